"""What happens to the conditioning of a model, in training and at one look (paper: the conditioning figures)."""

from orthocond.monitor.diagnosing import diagnose
from orthocond.monitor.diagnosis import Advice, Diagnosis, LayerDiagnosis
from orthocond.monitor.history import History
from orthocond.monitor.monitor import ConditionMonitor
from orthocond.monitor.trace import PreSVDLayer, pre_svd_layer

__all__ = [
    "Advice",
    "ConditionMonitor",
    "Diagnosis",
    "History",
    "LayerDiagnosis",
    "PreSVDLayer",
    "diagnose",
    "pre_svd_layer",
]
