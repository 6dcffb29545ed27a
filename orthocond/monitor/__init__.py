"""What happens to the conditioning of a model, in training and at one look (paper: the conditioning figures)."""

from orthocond.monitor.history import History
from orthocond.monitor.monitor import ConditionMonitor
from orthocond.monitor.trace import PreSVDLayer, pre_svd_layer

__all__ = ["ConditionMonitor", "History", "PreSVDLayer", "pre_svd_layer"]
