"""What only a fresh process shows: import orders, the launcher, the status command, an import without side effects."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def run(*command, cwd=ROOT, **environment):
    """A command's result; the checkout and the helpers of these tests can be imported in it."""
    paths = [str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")]
    drop = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    env = {name: value for name, value in os.environ.items() if name not in drop}
    env |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env=env | environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def last_json(result):
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(result.stdout.strip().splitlines()[-1])


def test_import_has_no_side_effects():
    code = "import sys, megatron_patch; print(sorted(m for m in sys.modules if m.split('.')[0] == 'megatron'))"
    result = run("-c", code)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr
    result = run("-c", "import sys, megatron_patch; megatron_patch.status(); print('megatron.core' in sys.modules)")
    assert result.stdout.strip() == "False", result.stderr


# Each line is a step of a training script; the patch comes at another place in each order.
STEPS = {
    "models": "import megatron.core.models.gpt",
    "alias": "from megatron.core.tensor_parallel import vocab_parallel_cross_entropy as alias",
    "build": "import megatron_gpt as gpt; world = gpt.single_process(); world.__enter__(); model = gpt.make_model()",
}
ORDERS = {
    "patch first": ("patch", "models", "alias", "build"),
    "after the functions": ("alias", "patch", "models", "build"),
    "last": ("models", "alias", "build", "patch"),
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_import_orders(order):
    steps = STEPS | {"patch": "import megatron_patch; megatron_patch.apply(replace_native=True, strict=True)"}
    finish = """
    import json
    batch = gpt.make_batch(2, 8)
    def measure():
        before = sum(megatron_patch.status().served.values())
        loss = gpt.forward(model, batch, batch.labels)
        error = (loss.double() - gpt.dense_loss(model, batch)).abs().max().item()
        return error, sum(megatron_patch.status().served.values()) - before
    native = measure()
    before = sum(megatron_patch.status().served.values())
    alias(gpt.forward(model, batch, None).float(), batch.labels)
    through_alias = sum(megatron_patch.status().served.values()) - before
    megatron_patch.revert()
    megatron_patch.apply(strict=True)
    megatrons_own = measure()
    model.config.cross_entropy_loss_fusion, model.config.cross_entropy_fusion_impl = True, "te_ce"
    print(json.dumps([native, through_alias, megatrons_own, measure(), megatron_patch.status().intact]))
    """
    code = "\n".join([steps[name] for name in order] + [textwrap.dedent(finish)])
    native, through_alias, megatrons_own, flag, intact = last_json(run("-W", "ignore", "-c", code))
    for error, served in (native, flag):
        assert error < 1e-5
        assert served == 1
    assert through_alias == 1
    assert megatrons_own[1] == 0
    assert intact


# A script that knows nothing of the patch. It says how it sees itself, and at exit whether it is still there.
PROBE = """
import atexit, json, os, pickle, sys

class Here: pass

def goodbye():
    print(json.dumps(seen | {"at exit": pickle.loads(pickle.dumps(Here())).__class__ is Here}))

seen = {
    "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__, "package": __package__,
    "spec": __spec__ is None, "loader": type(__loader__).__name__, "main": sys.modules["__main__"].__file__,
    "docstring": __doc__, "extra": sorted(set(globals()) - {"__annotations__"}),
}
core = sys.modules.get("megatron.core.model_parallel_config")
seen["patched"] = core is not None and hasattr(core.ModelParallelConfig.__post_init__, "__wrapped__")
atexit.register(goodbye)
import sibling
sys.exit(int(sys.argv[-1]))
"""


@pytest.fixture
def probe(tmp_path):
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "probe.py").write_text(PROBE)
    (folder / "sibling.py").write_text("")
    return tmp_path


def test_launched_as_if_run_directly(probe):
    arguments = ("scripts/probe.py", "--strict", "-x", "status", "7")
    direct = run(*arguments, cwd=probe)
    launched = run("-m", "megatron_patch", *arguments, cwd=probe)
    assert direct.returncode == launched.returncode == 7, launched.stderr
    direct, launched = (json.loads(r.stdout) for r in (direct, launched))
    assert direct.pop("patched") is False
    assert launched.pop("patched") is True
    assert launched == direct
    assert launched["argv"] == list(arguments)
    assert launched["at exit"]


def test_launcher_under_torchrun_with_a_model(tmp_path):
    """The flag in the configuration, and not a word of the patch in the script."""
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import json, sys
        import torch.distributed as dist
        import megatron_gpt as gpt
        dist.init_process_group("gloo")
        with gpt.model_parallel(1):
            model = gpt.make_model(cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te_ce")
            batch = gpt.make_batch(2, 8)
            loss, _ = gpt.loss_and_grads(model, batch, gpt.mean)
            error = (loss.double() - gpt.dense_loss(model, batch)).abs().max().item()
        dist.destroy_process_group()
        print(json.dumps([error, sys.argv[1:], dist.is_initialized()]))
        """)
    )
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
    result = run(*torchrun, "-m", "megatron_patch", script, "--lr", "1", cwd=tmp_path)
    error, arguments, _ = last_json(result)
    assert error < 1e-5
    assert arguments == ["--lr", "1"]
    assert "replaced megatron.core" in result.stderr
    assert "megatron_patch: te_ce: the loss is computed on logits\n" in result.stderr
    assert result.stderr.rstrip().endswith("megatron_patch: losses served in this process: triton 0, torch 1")


def test_launcher_replaces_native(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import megatron_patch; print(megatron_patch.status())")
    result = run("-m", "megatron_patch", "--replace-native", script)
    assert "replace_native=True" in result.stdout, result.stderr
    assert "NOT OURS" not in result.stdout
    assert "megatron_patch: losses served in this process: triton 0, torch 0" in result.stderr


def test_launcher_replaces_te(tmp_path):
    """Also the check of a `megatron.training` that lies next to the script, as in Megatron's own tree."""
    script = tmp_path / "tree" / "script.py"
    (tmp_path / "tree" / "megatron" / "training").mkdir(parents=True)
    (tmp_path / "tree" / "megatron" / "training" / "arguments.py").write_text(
        "def add_megatron_arguments(parser): return parser\n"
        "def validate_args(args, defaults={}): assert args.cross_entropy_fusion_impl != 'te'"
    )
    script.write_text(
        textwrap.dedent("""
        import types
        import megatron_patch
        from megatron.training.arguments import validate_args
        validate_args(types.SimpleNamespace(cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te"))
        print(megatron_patch.status())
        """)
    )
    result = run("-m", "megatron_patch", "--replace-te", script)
    assert "replace_native=False, replace_te=True" in result.stdout, result.stderr
    assert "megatron.training.arguments.validate_args: ours" in result.stdout
    assert "NOT OURS" not in result.stdout
    assert 'cross_entropy_fusion_impl="te" is served by te_ce; validate_args is shown ' in result.stderr
    assert run("-m", "megatron_patch", script).returncode == 1


def test_status_command():
    result = run("-m", "megatron_patch", "status")
    assert result.returncode == 0, result.stderr
    assert "LanguageModule.compute_language_model_loss: ours" in result.stdout
    assert "fused_cross_entropy._VocabParallelCrossEntropy: ours" in result.stdout
    assert "language_module.te_parallel_cross_entropy: ours" in result.stdout
    assert "losses served in this process: triton 0, torch 0" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("nothing.py",), 2, "there is no file 'nothing.py'"),
        ((), 2, "required: SCRIPT.py"),
        (("status", "now"), 2, "status takes no arguments, got now"),
    ],
)
def test_launcher_mistakes(arguments, status, message):
    result = run("-m", "megatron_patch", *arguments)
    assert message in result.stderr.splitlines()[-1], result.stderr
    assert result.returncode == status


@pytest.mark.parametrize("command", ["status", "script"])
def test_no_megatron_is_one_line(tmp_path, command):
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "__init__.py").write_text("")  # hides the installed one: there is no megatron.core in it
    script = tmp_path / "script.py"
    script.write_text("print('ran')")
    result = run("-m", "megatron_patch", script if command == "script" else command, cwd=tmp_path)
    assert result.returncode == 1
    assert result.stdout == ""
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("megatron_patch: error: megatron_patch needs megatron-core >= 0.10")
