"""`verl-sglang-sync report`: what report files tell, as a table, a picture and a trace."""

from verl_sglang_sync.report_files.runs import ReportFileError, Run, read_run

__all__ = ["ReportFileError", "Run", "read_run"]
