"""Checkpoints: what we write, and what other people hand in."""

import argparse
import dataclasses
import datetime
import hashlib
import pickle
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import GRAPH, inputs, refused, small
from torch import nn

from sensitivity import checkpoint
from sensitivity.errors import InputError, SensitivityWarning
from sensitivity.models import VARIANTS, Forecaster, variant_diagonal


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ckpt.pt"


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
