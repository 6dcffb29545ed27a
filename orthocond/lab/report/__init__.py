"""One HTML file that tells what a run, several runs or a table have found: offline, for people."""

from orthocond.lab.report.write import write_report

__all__ = ["write_report"]
