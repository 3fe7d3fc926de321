"""Commands in a container over mounted layers: a thin hull around an OCI runtime and overlayfs.

Face::

    cgroups    default_limits
    hostnet    find_ca_bundle, proxy_variables
    output     Collector
    signals    signal_number
    spec       Network, RunSpec
    state      remove_tree
    variables  merge_variables
"""

from dsec_layers.sandbox.box import Outcome, Sandbox, run
from dsec_layers.sandbox.output import Captured, capture
from dsec_layers.sandbox.spec import Bind, Network, RunSpec

__all__ = ["Bind", "Captured", "Network", "Outcome", "RunSpec", "Sandbox", "capture", "run"]
