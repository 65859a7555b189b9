from .analysis.deposit import (
    DepositReport as DepositReport,
)
from .analysis.deposit import (
    deposit as deposit,
)
from .analysis.deposit import (
    deposit_spread as deposit_spread,
)
from .analysis.deposit import (
    head_drops as head_drops,
)
from .analysis.deposit_study import (
    DepositStudy as DepositStudy,
)
from .analysis.deposit_study import (
    deposit_study as deposit_study,
)
from .analysis.gradients import (
    gradient_margins as gradient_margins,
)
from .analysis.gradients import (
    positional_gradients as positional_gradients,
)
from .analysis.sufficiency import (
    SufficientHeads as SufficientHeads,
)
from .analysis.sufficiency import (
    only_heads as only_heads,
)
from .analysis.sufficiency import (
    sufficient_heads as sufficient_heads,
)
from .analysis.training_dynamics import (
    dynamics as dynamics,
)
from .model.config import (
    SyntheticConfig as SyntheticConfig,
)
from .model.to_hooked import (
    to_hooked_transformer as to_hooked_transformer,
)
from .model.transformer import (
    SyntheticModel as SyntheticModel,
)
from .tasks.lookups import (
    IndexLookup as IndexLookup,
)
from .tasks.lookups import (
    Retrieval as Retrieval,
)
from .tasks.sampling import (
    Split as Split,
)
from .tasks.sampling import (
    Task as Task,
)
from .tasks.triggers import (
    TriggerCount as TriggerCount,
)
from .tasks.triggers import (
    TriggerDistance as TriggerDistance,
)
from .training.checkpoints import (
    load_checkpoint as load_checkpoint,
)
from .training.checkpoints import (
    save_checkpoint as save_checkpoint,
)
from .training.evaluate import (
    evaluate as evaluate,
)
from .training.presets import (
    Preset as Preset,
)
from .training.presets import (
    accuracies as accuracies,
)
from .training.presets import (
    preset as preset,
)
from .training.presets import (
    train_preset as train_preset,
)
from .training.runs import (
    TrainConfig as TrainConfig,
)
from .training.runs import (
    TrainRun as TrainRun,
)
from .training.train import (
    TrainingInterrupted as TrainingInterrupted,
)
from .training.train import (
    train as train,
)
