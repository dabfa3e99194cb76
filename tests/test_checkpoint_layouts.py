"""Checkpoints in other people's layouts, weights that need a builder, and pickled modules."""

import hashlib
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from checkpoints import inputs, refused, small
from torch import nn

from sensitivity import checkpoint


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ckpt.pt"


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A module of the user's in the working directory; its name is different in every test."""
    monkeypatch.chdir(tmp_path)
    name = f"user_{hashlib.md5(str(tmp_path).encode(), usedforsecurity=False).hexdigest()[:8]}"
    (tmp_path / f"{name}.py").write_text(
        textwrap.dedent(
            """
            from torch import nn
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.body = nn.Linear(2, 2)
                def forward(self, x):
                    return self.body(x)
            def build():
                return Net()
            def wrong():
                return 3
            def broken():
                raise KeyError("nodes")
            number = 3
            """
        )
    )
    yield name
    sys.modules.pop(name, None)


# -- other people's layouts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model.", "module._orig_mod."])
def test_prefixes_of_wrappers(path, prefix):
    model = small(seed=4)
    state = {prefix + name: value for name, value in model.state_dict().items()}
    torch.save({"state_dict": state, "config": model.config}, path)
    loaded = checkpoint.load(path)
    assert torch.equal(loaded.model(inputs()), model.eval()(inputs()))
    assert loaded.key_mapping == {prefix + name: name for name in model.state_dict()}
    assert f"stripped {prefix!r} from the names of all {len(state)} weights" in loaded.notes


def test_a_prefix_on_some_names_stays(path):
    model = small()
    state = {
        ("module." if index else "") + name: value for index, (name, value) in enumerate(model.state_dict().items())
    }
    torch.save({"state_dict": state, "config": model.config}, path)
    refused(path, r"do not fit Forecaster \(missing: .* and \d+ more; unexpected: module\..* and \d+ more\)")


def test_a_prefix_that_is_the_models_own_stays(path):
    wrapper = nn.ModuleDict({"model": nn.Linear(2, 2)})
    torch.save(wrapper.state_dict(), path)
    loaded = checkpoint.load(path, builder=lambda: nn.ModuleDict({"model": nn.Linear(2, 2)}))
    assert loaded.key_mapping == {}
    assert torch.equal(loaded.model["model"].weight, wrapper["model"].weight)


def test_a_weight_of_another_shape(path):
    torch.save({"state_dict": small().state_dict(), "config": small().config | {"horizon": 6}}, path)
    refused(path, r"of another shape: horizon_readout\.weight \(12, 12\) for \(6, 12\), horizon_readout\.bias")


@pytest.mark.parametrize("place", ["config", None])
def test_lightning_with_hyper_parameters(path, place):
    model = small(seed=5)
    hyper = {"lr": 0.1} | ({place: model.config} if place else model.config)
    content = {
        "epoch": 7,
        "global_step": 70,
        "pytorch-lightning_version": "2.4.0",
        "state_dict": {f"model.{name}": value for name, value in model.state_dict().items()},
        "hyper_parameters": hyper,
        "optimizer_states": [{"state": {}}],
    }
    torch.save(content, path)
    loaded = checkpoint.load(path)
    assert torch.equal(loaded.model(inputs()), model.eval()(inputs()))
    assert loaded.training == {"epoch": 7, "global_step": 70}


def test_lightning_without_hyper_parameters(path):
    model = small(seed=5)
    torch.save({"pytorch-lightning_version": "2.4.0", "state_dict": model.state_dict()}, path)
    refused(path, "is a Lightning checkpoint without the hyper-parameters .*; add --builder package.module:function")
    loaded = checkpoint.load(path, builder=lambda: small(seed=6))
    assert torch.equal(loaded.model(inputs()), model.eval()(inputs()))
    assert loaded.config == model.config


def test_weights_alone_need_a_builder(path, script):
    torch.save({"body.weight": torch.eye(2), "body.bias": torch.zeros(2)}, path)
    refused(path, "is weights only, so the model that they belong to is not known; add --builder")
    loaded = checkpoint.load(path, builder=f"{script}:build")
    assert type(loaded.model).__name__ == "Net"
    assert not loaded.model.training
    assert torch.equal(loaded.model(torch.ones(1, 2)), torch.ones(1, 2))
    assert str(Path.cwd()) not in sys.path


@pytest.mark.parametrize(
    ("builder", "match"),
    [
        ("build", "--builder takes package.module:function, not 'build'"),
        ("absent_module:build", "importing absent_module failed with ModuleNotFoundError"),
        ("{script}:absent", r"the module user_\w+ has no function 'absent'"),
        ("{script}:number", r"the module user_\w+ has no function 'number'"),
        ("{script}:wrong", r"the builder user_\w+:wrong must return a torch.nn.Module, not int"),
        ("{script}:broken", r"the builder user_\w+:broken failed with KeyError: 'nodes'"),
    ],
)
def test_builders_that_do_not_build(path, script, builder, match):
    torch.save({"body.weight": torch.eye(2), "body.bias": torch.zeros(2)}, path)
    refused(path, match, builder=builder.format(script=script))


def test_infinite_masks_in_buffers_are_let_through_and_nan_is_not(path):
    class Masked(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.register_buffer("mask", torch.full((2,), -torch.inf))

    torch.save(Masked().state_dict(), path)
    assert checkpoint.load(path, builder=Masked).model.mask[0] == -torch.inf
    torch.save(Masked().state_dict() | {"mask": torch.full((2,), torch.nan)}, path)
    refused(path, "the weight 'mask' in .* is NaN in 2 of 2 entries", builder=Masked)


# -- pickled modules ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("under", [None, "model"])
def test_a_pickled_module_needs_trust(path, under):
    model = nn.Linear(2, 2)
    torch.save({under: model} if under else model, path)
    refused(path, r"it asks for torch\.nn\.modules\.linear\.Linear, which could run code; .*--trust-pickle")
    loaded = checkpoint.load(path, trust_pickle=True)
    assert torch.equal(loaded.model.weight, model.weight)
    assert not loaded.model.training
    with torch.no_grad():
        model.weight[0, 0] = torch.nan
    torch.save(model, path)
    refused(path, "the weight 'weight' in .* is NaN", trust_pickle=True)


def test_a_module_pickled_in_a_script(path, script):
    code = f"""
    import torch
    {(path.parent / (script + ".py")).read_text().replace(chr(10), chr(10) + "    ")}
    torch.manual_seed(1)
    net = Net()
    torch.save(net, {str(path)!r})
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
    refused(path, r"it asks for __main__\.Net, which could run code; .*--trust-pickle")
    refused(
        path,
        r"pickled together with the class Net of __main__, which is not there now; .*--builder package.module:function",
        trust_pickle=True,
    )
    loaded = checkpoint.load(path, trust_pickle=True, builder=f"{script}:build")
    torch.manual_seed(1)
    assert torch.equal(loaded.model.body.weight, nn.Linear(2, 2).weight)


def test_a_module_of_a_package_that_is_gone(path, script):
    torch.save({"body.weight": torch.eye(2), "body.bias": torch.zeros(2)}, path)
    torch.save(checkpoint.load(path, builder=f"{script}:build").model, path)
    del sys.modules[script]
    refused(path, rf"pickled together with the module {script}, which is not there now", trust_pickle=True)
