"""The public names of fedsim, each with the module that defines it.

Type checkers read this file, and fedsim/__init__.py imports by it.
"""

from fedsim.algorithm import (
    Algorithm as Algorithm,
)
from fedsim.algorithm import (
    AnyShard as AnyShard,
)
from fedsim.algorithm import (
)
from fedsim.algorithm import (
    Context as Context,
)
from fedsim.algorithm import (
    Exchange as Exchange,
)
from fedsim.algorithm import (
)
from fedsim.algorithm import (
    Task as Task,
)
from fedsim.algorithm import (
)
from fedsim.data.datasets import Dataset as Dataset
from fedsim.errors import (
    AccessError as AccessError,
)
from fedsim.errors import (
    ConnectionLost as ConnectionLost,
)
from fedsim.errors import (
    DataError as DataError,
)
from fedsim.errors import (
    DiskError as DiskError,
)
from fedsim.errors import (
    FedsimError as FedsimError,
)
from fedsim.errors import (
    Interrupted as Interrupted,
)
from fedsim.errors import (
    MismatchError as MismatchError,
)
from fedsim.errors import (
    TaskError as TaskError,
)
from fedsim.errors import (
    UsageError as UsageError,
)
from fedsim.errors import (
    WireError as WireError,
)
from fedsim.experiment import Experiment as Experiment
from fedsim.learning.gaussian import Gaussian as Gaussian
from fedsim.learning.gaussian import Point as Point
from fedsim.learning.gaussian import Samples as Samples
from fedsim.learning.shards import Shard as Shard
from fedsim.learning.solvers.first_order import LocalTraining as LocalTraining
from fedsim.learning.solvers.first_order import minimise as minimise
from fedsim.participation import ClientPopulation as ClientPopulation
from fedsim.participation import Participation as Participation
from fedsim.seeds import RandomStream as RandomStream
from fedsim.step_rules import At as At
from fedsim.step_rules import Step as Step
from fedsim.step_rules import step_size as step_size
from fedsim.wire.codecs.base import Bound as Bound
from fedsim.wire.codecs.base import Codec as Codec
from fedsim.wire.codecs.base import Part as Part
from fedsim.wire.codecs.base import Spec as Spec
from fedsim.wire.schema import (
    Check as Check,
)
from fedsim.wire.schema import (
    Curvature as Curvature,
)
from fedsim.wire.schema import (
    Delta as Delta,
)
from fedsim.wire.schema import (
    Dual as Dual,
)
from fedsim.wire.schema import (
    FieldKind as FieldKind,
)
from fedsim.wire.schema import (
    Flag as Flag,
)
from fedsim.wire.schema import (
    FullDelta as FullDelta,
)
from fedsim.wire.schema import (
    FullPrecision as FullPrecision,
)
from fedsim.wire.schema import (
    Gradient as Gradient,
)
from fedsim.wire.schema import (
    Inputs as Inputs,
)
from fedsim.wire.schema import (
    Least as Least,
)
from fedsim.wire.schema import (
    Logits as Logits,
)
from fedsim.wire.schema import (
    Mean as Mean,
)
from fedsim.wire.schema import (
    Norm as Norm,
)
from fedsim.wire.schema import (
    Owners as Owners,
)
from fedsim.wire.schema import (
    Precision as Precision,
)
from fedsim.wire.schema import (
    Scalar as Scalar,
)
from fedsim.wire.schema import (
    Shift as Shift,
)
from fedsim.wire.schema import (
    Statistic as Statistic,
)
from fedsim.wire.schema import (
    Total as Total,
)
from fedsim.wire.schema import (
    Weights as Weights,
)
from launch.api import (
    Run as Run,
)
from launch.api import (
    algorithms as algorithms,
)
from launch.api import (
    compare as compare,
)
from launch.api import (
    open as open,
)
from launch.api import (
    plan as plan,
)
from launch.api import (
    preset as preset,
)
from launch.api import (
    resume as resume,
)
from launch.api import (
    run as run,
)
from launch.api import (
    sweep as sweep,
)

__version__: str
