"""Commands in a container over mounted layers: a thin hull around an OCI runtime and overlayfs."""

from dsec_layers.sandbox.box import Outcome, Sandbox, run
from dsec_layers.sandbox.output import Captured, capture
from dsec_layers.sandbox.spec import Bind, Network, RunSpec

__all__ = ["Bind", "Captured", "Network", "Outcome", "RunSpec", "Sandbox", "capture", "run"]
