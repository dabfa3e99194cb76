"""Checkpoints: what we write, and what other people hand in."""

import argparse
import dataclasses
import datetime
import hashlib
import pickle
import subprocess
import sys
import textwrap
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles import draw
from torch import nn

from sensitivity import checkpoint
from sensitivity.errors import InputError, SensitivityWarning
from sensitivity.models import VARIANTS, Forecaster, variant_diagonal

GRAPH = torch.tensor([[1.0, 0.5, 0.0], [0.2, 1.0, 0.0], [0.3, 0.0, 1.0]])


def small(seed=0, **options):
    torch.manual_seed(seed)
    return Forecaster(3, **({"dim": 8, "depth": 2, "heads": 2} | options))


def inputs():
    return draw(2, 12, 3, 2).float()


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


def refused(path, match, **options):
    with pytest.raises(InputError, match=match) as found:
        checkpoint.load(path, **options)
    assert "\n" not in str(found.value)
    return str(found.value)


# -- our own files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("spatial", ["as_published", "adaptive", "distance", "none"])
def test_round_trip(path, variant, spatial):
    diagonal, residual = variant_diagonal(variant, heads=2, learned=spatial == "none")
    graph = GRAPH if spatial == "distance" else None
    model = small(spatial=spatial, diagonal=diagonal, residual=residual, graph=graph)
    checkpoint.save(path, model)
    loaded = checkpoint.load(path)
    assert not loaded.model.training
    assert loaded.config == model.config
    assert torch.equal(loaded.model(inputs()), model.eval()(inputs()))
    assert loaded.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (loaded.key_mapping, loaded.notes) == ({}, ())


def test_what_goes_along(path):
    @dataclasses.dataclass
    class Place:
        file: Path

    class Scaler:
        def state(self):
            return {"mean": np.float32(54.5), "std": np.arange(3.0)}

    options = argparse.Namespace(seed=np.int64(3), when=datetime.date(2012, 3, 1), rates=(0.1, np.bool_(True)))
    checkpoint.save(path, small(), scaler=Scaler(), data={"place": Place(Path("a/b.h5"))}, training=vars(options))
    loaded = checkpoint.load(path)
    assert loaded.scaler["mean"] == 54.5
    assert loaded.scaler["std"].tolist() == [0, 1, 2]
    assert loaded.data == {"place": {"file": "a/b.h5"}}
    assert loaded.training == {"seed": 3, "when": "2012-03-01", "rates": [0.1, True]}
    assert loaded.metrics is None


def test_the_file_is_plain(path):
    checkpoint.save(path, small(), metrics={"mae": np.float64(3.1)})
    content = torch.load(path, weights_only=True)
    assert content["format"] == checkpoint.FORMAT
    assert content["version"] == checkpoint.VERSION
    assert set(content["libraries"]) == {"torch", "numpy", "python"}
    assert type(content["metrics"]["mae"]) is float
    assert content["weights"].keys() == small().state_dict().keys()


def test_float64_weights_stay_float64(path):
    model = small().double()
    checkpoint.save(path, model)
    assert torch.equal(checkpoint.load(path).model(inputs().double()), model.eval()(inputs().double()))


def test_wrapped_models_are_saved_bare(path):
    model = small()
    checkpoint.save(path, nn.DataParallel(model))
    assert checkpoint.load(path).key_mapping == {}


def test_saving_neither_needs_nor_leaves_anything(path):
    model = small().train()
    checkpoint.save(path, model)
    assert model.training
    assert [entry.name for entry in path.parent.iterdir()] == ["ckpt.pt"]


def test_what_cannot_be_saved(path, monkeypatch):
    checkpoint.save(path, small())
    before = path.read_bytes()
    with pytest.raises(InputError, match="Linear has no config dict to be built again from"):
        checkpoint.save(path, nn.Linear(2, 2))
    with pytest.raises(InputError, match=r"training\['loss'\] is a L1Loss, which a plain checkpoint does not hold"):
        checkpoint.save(path, small(), training={"loss": nn.L1Loss()})
    with pytest.raises(
        InputError, match=r"metrics\['by'\] has the key \(1, 2\); a plain checkpoint has keys of text or integers"
    ):
        checkpoint.save(path, small(), metrics={"by": {(1, 2): 3}})

    def deny(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "write_bytes", deny)
    with pytest.raises(InputError, match=r"cannot write .*ckpt\.pt: no permission in the folder"):
        checkpoint.save(path, small(seed=1))
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == ["ckpt.pt"]


# -- files that are none ------------------------------------------------------------------------------------------


def test_no_file_and_a_directory(tmp_path):
    refused(tmp_path / "absent.pt", r"there is no file .*absent\.pt; check the path")
    refused(tmp_path, r"is a directory, not a checkpoint; name the file\.")
    checkpoint.save(tmp_path / "ckpt.pt", small())
    refused(tmp_path, r"is a directory, not a checkpoint; name the file, such as .*ckpt\.pt\.")


@pytest.mark.parametrize("part", [0.01, 0.5, 0.99])
def test_truncated(path, part):
    checkpoint.save(path, small())
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * part)])
    refused(path, "is truncated: its end is missing; copy it again")


def test_truncated_file_of_the_old_layout(path):
    torch.save(small().state_dict(), path, _use_new_zipfile_serialization=False)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    refused(path, "is damaged or not a checkpoint .*copy it again")


def test_a_flipped_byte_is_noticed(path):
    checkpoint.save(path, small())
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    refused(path, r"is damaged \(.* does not match its checksum\); copy it again")


def test_a_flipped_byte_in_a_file_of_others_is_said(path):
    torch.save(small().state_dict(), path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.warns(SensitivityWarning, match=r"may be damaged \(.* does not match its checksum\), unless it was"):
        checkpoint.load(path, builder=small)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "is empty; the run that should have written it did not finish"),
        (b"speed,time\n1,2\n", "is not a checkpoint: it does not begin as a file of torch.save does"),
        (b"\x89HDF\r\n\x1a\n" + bytes(100), "is not a checkpoint"),
        (pickle.dumps({"a": 1}), "is not a checkpoint"),
    ],
)
def test_foreign_files(path, content, match):
    path.write_bytes(content)
    refused(path, match)


def test_other_archives(path):
    np.savez(path.with_suffix(".npz"), a=np.zeros(3))
    refused(path.with_suffix(".npz"), "it is a zip archive that torch.save did not write")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, but its files are about
        torch.jit.save(torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)), str(path))
    refused(path, "is a TorchScript archive, not a checkpoint; load it with torch.jit.load")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ([1, 2], "is a checkpoint of another kind: it holds a list, not weights"),
        (torch.zeros(3), "it holds a Tensor, not weights"),
        ({"optimizer": {"lr": 0.1}, "epoch": 3}, "another kind: a dict of optimizer, epoch, without weights"),
        ({}, "a dict of nothing, without weights under a usual name"),
        ({"format": checkpoint.FORMAT, "version": 99}, "has version 99 of the checkpoint format.* upgrade"),
        ({"format": checkpoint.FORMAT, "version": 1, "model": "Forecaster"}, "it lacks config, weights"),
    ],
)
def test_checkpoints_of_another_kind(path, content, match):
    torch.save(content, path)
    refused(path, match)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(path, value):
    model = small()
    with torch.no_grad():
        model.blocks[1].temporal.output.weight[0, 0] = value
    checkpoint.save(path, model)
    kind = "NaN" if value != value else "infinite"
    refused(path, rf"the weight 'blocks\.1\.temporal\.output\.weight' in .* is {kind} in 1 of 64 entries: the training")


# -- code in files ------------------------------------------------------------------------------------------------


class Payload:
    def __init__(self, place):
        self.place = str(place)

    def __reduce__(self):
        return (Path.touch, (Path(self.place),))


class SystemPayload(Payload):
    def __reduce__(self):
        import os

        return (os.system, (f"touch {self.place}",))


@pytest.mark.parametrize("kind", [Payload, SystemPayload])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_planted_payload_runs_only_when_it_is_trusted(path, kind, zipped):
    mark = path.with_name("mark")
    content = {"state_dict": small().state_dict(), "config": small().config, "extra": kind(mark)}
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    message = refused(path, r"asks for [\w.]+, which could run code; .* add --trust-pickle \(trust_pickle=True\)")
    assert ("getattr" if kind is Payload else "system") in message
    assert not mark.exists()
    checkpoint.load(path, trust_pickle=True)
    assert mark.exists()


def test_harmless_classes_are_read(path):
    beside = {
        "best": np.float64(3.1),
        "curve": np.arange(3.0),
        "epoch": np.int64(3),
        "args": argparse.Namespace(lr=0.1, out=Path("runs"), **small().config),
    }
    torch.save(beside | {"state_dict": small().state_dict()}, path)
    before = set(torch.serialization.get_safe_globals())
    loaded = checkpoint.load(path)
    assert loaded.config == small().config
    assert set(torch.serialization.get_safe_globals()) == before
    assert loaded.notes == ("the weights stand under 'state_dict' in the file",)


def test_numbers_written_by_the_other_numpy_are_read(path):
    torch.save({"best": np.float64(3.1), "config": small().config, "state_dict": small().state_dict()}, path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    names = [b"numpy._core.multiarray", b"numpy.core.multiarray"]
    here, other = names if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else names[::-1]
    with zipfile.ZipFile(path, "w") as archive:
        for name, value in members.items():
            assert here in value or not name.endswith("data.pkl")
            archive.writestr(name, value.replace(here, other) if name.endswith("data.pkl") else value)
    assert isinstance(checkpoint.load(path).model, Forecaster)


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


# -- devices ------------------------------------------------------------------------------------------------------


def from_a_gpu(path, content, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda _: "cuda:0")
        torch.save(content, path)


def test_tensors_of_a_gpu_are_read_on_the_cpu(path, monkeypatch):
    model = small()
    from_a_gpu(path, {"state_dict": model.state_dict(), "config": model.config}, monkeypatch)
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="CUDA device"):
            torch.load(path)
    loaded = checkpoint.load(path).model
    assert {parameter.device.type for parameter in loaded.parameters()} == {"cpu"}
    assert torch.equal(loaded(inputs()), model.eval()(inputs()))


def test_devices_that_are_not_there(path):
    checkpoint.save(path, small())
    refused(path, "map_location must name a device, such as 'cpu' or 'cuda:0', not 'gpu'", map_location="gpu")
    if torch.cuda.is_available():
        pytest.skip("a GPU is there")
    refused(path, "map_location='cuda' asks for a GPU, but torch sees none here; use 'cpu'", map_location="cuda")


def test_what_a_run_is_resumed_from_points_at_the_model_beside_it(path, tmp_path):
    state = tmp_path / "last.ckpt"
    torch.save({"format": "attention-sensitivity training state", "model": small().state_dict()}, state)
    with pytest.raises(InputError, match=r"last\.ckpt is the state that a training run .* name the ckpt\.pt of the"):
        checkpoint.load(state)
    path.touch()
    with pytest.raises(InputError, match=rf"not a model; name the model beside it, {path}\."):
        checkpoint.load(state)


def test_a_path_that_is_none():
    with pytest.raises(InputError, match="a checkpoint is named by the path of its file, not by None"):
        checkpoint.load(None)
