"""Strided bytes as plain numbers: split, composed, joined. Nothing here touches a tensor."""
