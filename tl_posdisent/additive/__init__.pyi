from .attention.fit import fit_attention as fit_attention
from .attention.result import AttentionFit as AttentionFit
from .fit import fit_additive as fit_additive
from .fit_from_qk import fit_additive_qk as fit_additive_qk
from .result import AdditiveFit as AdditiveFit
