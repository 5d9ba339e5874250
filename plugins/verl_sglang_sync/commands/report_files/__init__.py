"""`verl-sglang-sync report`: shows report files as a table, a plot or a trace."""
