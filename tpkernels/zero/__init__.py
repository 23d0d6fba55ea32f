"""ZeRO stages 1 to 3: parameters, gradients and optimizer states sharded over data-parallel ranks.

zero            the door: a model in, a ZeroManager out
units, config   what is gathered together, and every setting
construct       parameters move into flat buffers (flat_buffer, layout)
hooks           what the model reports: forward, backward, recomputation
engine          asks the scheduler and performs: unit, gradients, transfers, roll_call
"""

from tpkernels.zero.config import TrainingHints as TrainingHints
from tpkernels.zero.config import ZeroConfig as ZeroConfig
from tpkernels.zero.entry import zero as zero
from tpkernels.zero.manager import ZeroManager as ZeroManager
from tpkernels.zero.policies import Precision as Precision
