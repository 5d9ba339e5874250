"""Strided bytes as plain numbers: split, composed, joined; nothing here touches a tensor."""
