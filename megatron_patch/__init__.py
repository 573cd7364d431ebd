"""The plugin that makes Megatron use te_ce's loss.

    import megatron_patch
    megatron_patch.apply()
    config = TransformerConfig(..., cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te_ce")

or "te_ce_linear", for the loss fused with the output layer; or, with nothing of the training script changed,
`torchrun ... -m megatron_patch SCRIPT.py ...`.

Importing this package imports no Megatron and changes nothing. Imports go one way: megatron_patch -> te_ce.

    patch.py                apply, revert, patched, status
    seams.py                what is replaced in which release
    releases.py             which releases are known, and which is here
    bindings.py             replace and restore attributes, all or none
    application.py          one application of the patch: what it was asked for, what it has said
    model.py                labels, tensor-parallel group and widths of a model
    wiring.py               LanguageModule's loss method, served by te_ce
    linear.py               the same for "te_ce_linear": the loss fused with the output layer
    deferred.py             the logits that this layer hands on instead: computed when somebody looks
    maxima.py               their largest of each row, for metrics, without the rest
    scope.py                when it may do so: in a forward with labels
    output_layer.py         and whether: nothing about the layer that the fused loss does not reproduce
    agreement.py            that all ranks do the same about it
    main_grad.py            the weight's gradient, accumulated into main_grad
    native.py               stand-ins for Megatron's own losses (replace_native)
    transformer_engine.py   "te" served, and the checks that refuse it lifted (replace_te)
    arguments.py            Megatron's command line: the values, and te_ce's options as --te-ce-*
    config.py               does a configuration ask for te_ce; dead settings refused
    status.py               what status() returns
    log.py                  what the log says, and on which rank
    __main__.py             the launcher and `python -m megatron_patch status`
"""

from megatron_patch.errors import PatchError
from megatron_patch.patch import apply, patched, revert, status
from megatron_patch.status import BindingStatus, Status

__all__ = ["BindingStatus", "PatchError", "Status", "apply", "patched", "revert", "status"]
