"""The plugin that makes Megatron use te_ce's loss.

    import megatron_patch
    megatron_patch.apply()
    config = TransformerConfig(..., cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te_ce")

or, with nothing of the training script changed, `torchrun ... -m megatron_patch SCRIPT.py ...`.

Importing this package imports no Megatron and changes nothing. Imports go one way: megatron_patch -> te_ce.

    patch.py      apply, revert, patched, status
    seams.py      what is replaced in which release
    bindings.py   replace and restore attributes, all or none
    wiring.py     LanguageModule's loss method, served by te_ce
    native.py     stand-ins for Megatron's own losses (replace_native)
    transformer_engine.py   "te" served, and the checks that refuse it lifted (replace_te)
    config.py     does a configuration ask for te_ce; dead settings refused
    status.py     what status() returns
    log.py        what the log says, and on which rank
    __main__.py   the launcher and `python -m megatron_patch status`
"""

from megatron_patch.errors import PatchError
from megatron_patch.patch import apply, patched, revert, status
from megatron_patch.status import BindingStatus, Status

__all__ = ["BindingStatus", "PatchError", "Status", "apply", "patched", "revert", "status"]
