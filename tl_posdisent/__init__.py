"""Position and content in attention: is this head looking at *where* or at *what*?

Shapes, everywhere: scores are ``[*batch, query, key]``, logits before the softmax, scale included. A *distance* is
``query_pos - key_pos``. Queries and keys are meant *before* rotation and after any QK-norm:
``[*batch, pos, head, d_head]`` at a model. Heads are query heads unless a shape says ``kv``.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ._public import *
    from ._public import __all__ as __all__
else:
    # The public names are imported when the first of them is asked for: with them comes torch, and whoever wants no
    # more than the command line's help should not have to wait for it.
    def __getattr__(name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        public = import_module("._public", __name__)
        globals().update({key: getattr(public, key) for key in ("__all__", *public.__all__)})
        if name not in globals():  # a part of the package, imported on the way, is there by now
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals()[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})
