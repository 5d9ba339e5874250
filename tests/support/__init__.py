"""What several tests share: real servers, real trainer ranks, nothing faked."""
