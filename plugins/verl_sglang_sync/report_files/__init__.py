"""`verl-sglang-sync report`: shows report files as a table, a plot or a trace."""

from verl_sglang_sync.report_files.runs import ReportFileError, Run, read_run

__all__ = ["ReportFileError", "Run", "read_run"]
