"""What happens to the conditioning of a model, in training and at one look (paper: the conditioning figures)."""

from orthocond.monitor.condition_monitor import ConditionMonitor
from orthocond.monitor.data_flow import PreSVDLayer, pre_svd_layer
from orthocond.monitor.diagnosing import diagnose
from orthocond.monitor.diagnosis import Advice, Decomposition, Diagnosis, Failure, LayerDiagnosis
from orthocond.monitor.history import History

__all__ = [
    "Advice",
    "ConditionMonitor",
    "Decomposition",
    "Diagnosis",
    "Failure",
    "History",
    "LayerDiagnosis",
    "PreSVDLayer",
    "diagnose",
    "pre_svd_layer",
]
