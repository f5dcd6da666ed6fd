"""The public names of fedsim, each with the module that defines it.

Type checkers read this file. fedsim/__init__.py imports each name from the module that this file gives.
"""

from fedsim.algorithm import Algorithm as Algorithm
from fedsim.data.datasets import Dataset as Dataset, load_dataset as load_dataset
from fedsim.errors import (
    AccessError as AccessError,
    ConnectionLost as ConnectionLost,
    DataError as DataError,
    DiskError as DiskError,
    FedsimError as FedsimError,
    Interrupted as Interrupted,
    MismatchError as MismatchError,
    TaskError as TaskError,
    UsageError as UsageError,
    WireError as WireError,
)
from fedsim.experiment import Experiment as Experiment
from fedsim.learning.blocks import accumulating as accumulating
from fedsim.learning.gaussian import Gaussian as Gaussian, Point as Point, Samples as Samples
from fedsim.learning.shards import Shard as Shard, endless_batches as endless_batches
from fedsim.learning.solvers.first_order import (
    LocalTraining as LocalTraining,
    Moments as Moments,
    minimise as minimise,
)
from fedsim.learning.solvers.ivon import (
    IvonMoments as IvonMoments,
    IvonTraining as IvonTraining,
    ivon as ivon,
)
from fedsim.optional_methods import Unsent as Unsent
from fedsim.participation import ClientPopulation as ClientPopulation, Participation as Participation
from fedsim.round_values import (
    AnyShard as AnyShard,
    Arrival as Arrival,
    Context as Context,
    Exchange as Exchange,
    Task as Task,
)
from fedsim.seeds import RandomStream as RandomStream
from fedsim.step_rules import At as At, Step as Step, step_size as step_size
from fedsim.wire.codecs.base import Bound as Bound, Codec as Codec, Part as Part, Spec as Spec
from fedsim.wire.gaussian_messages import Increment as Increment, Posterior as Posterior
from fedsim.wire.schema import (
    Check as Check,
    Count as Count,
    Curvature as Curvature,
    Delta as Delta,
    Dual as Dual,
    FieldKind as FieldKind,
    Flag as Flag,
    FullDelta as FullDelta,
    FullPrecision as FullPrecision,
    Gradient as Gradient,
    Inputs as Inputs,
    Least as Least,
    Logits as Logits,
    Mean as Mean,
    Norm as Norm,
    Owners as Owners,
    Precision as Precision,
    Scalar as Scalar,
    Shift as Shift,
    Statistic as Statistic,
    Sum as Sum,
    Total as Total,
    Weights as Weights,
)
from launch.api import (
    Run as Run,
    algorithms as algorithms,
    compare as compare,
    open as open,
    plan as plan,
    preset as preset,
    resume as resume,
    run as run,
    sweep as sweep,
)

__version__: str
