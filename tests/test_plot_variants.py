"""Variants side by side: one scale for every row, whatever the columns hold."""

from __future__ import annotations

import math

import pytest
import torch
from matplotlib.colors import LogNorm
from oracles import draw

from sensitivity import plot
from sensitivity.errors import InputError
from sensitivity.plot import style
from sensitivity.result import SensitivityMap

pytestmark = [pytest.mark.filterwarnings("error::UserWarning"), pytest.mark.filterwarnings("error::RuntimeWarning")]


def one(scale: float = 1.0, masked: bool = False, length: int = 6, **changes) -> SensitivityMap:
    scores = draw(2, 3, length, length)
    attended = ~torch.eye(length, dtype=torch.bool) if masked else torch.ones(length, length, dtype=torch.bool)
    attention = scores.masked_fill(~attended, -math.inf).softmax(-1)
    norms = scale * (draw(2, length, length, seed=1).abs() + 0.1)
    return SensitivityMap(norms, attention=attention, attended=attended.expand(1, 1, -1, -1), **changes)


def scales(row):
    return [image.norm for ax in row for image in ax.images[1:]]


def test_every_row_has_one_scale_and_one_bar():
    maps = {"none": one(), "mask": one(30.0, masked=True), "dropout": one(0.1)}
    axes = plot.variants(maps)
    assert axes.shape == (2, 3)
    for row in axes:
        norms = scales(row)
        assert len(norms) == 3
        assert len({(norm.vmin, norm.vmax) for norm in norms}) == 1
    means = [value.norms.mean(dim=0) for value in maps.values()]
    assert scales(axes[1])[0].vmin == pytest.approx(min(float(mean.min()) for mean in means))
    assert scales(axes[1])[0].vmax == pytest.approx(max(float(mean.max()) for mean in means))
    assert isinstance(scales(axes[1])[0], LogNorm)
    assert scales(axes[0])[0].vmin == 0.0
    assert len(axes[0, 0].figure.axes) == 6 + 2


def test_columns_are_named_and_masked_pairs_explained(tmp_path):
    axes = plot.variants({"none": one(), "mask": one(masked=True)}, title="layer")
    assert [ax.get_title() for ax in axes[0]] == ["none", "mask"]
    assert axes[0, 0].figure.get_suptitle() == "layer"
    assert [text.get_text() for text in axes[0, 1].get_legend().get_texts()] == ["masked"]
    plot.save(axes[0, 0], tmp_path / "variants.png")


def test_tiny_values_do_not_stretch_the_scale():
    small = one()
    small.norms[:, 0, 1] = 1e-20
    norm = scales(plot.variants({"none": small})[1])[0]
    assert norm.vmax / norm.vmin == pytest.approx(1e6)


def test_maps_of_zeros_and_of_one_value_are_drawn():
    zeros = one(0.0)
    assert plot.variants({"none": zeros}).shape == (2, 1)
    flat = SensitivityMap(torch.ones(1, 3, 3), attention=torch.full((1, 1, 3, 3), 1 / 3))
    norm = scales(plot.variants({"none": flat})[1])[0]
    assert norm.vmin < 1 < norm.vmax


def test_weights_and_norms_have_their_labels():
    figure = plot.variants({"none": one()})[0, 0].figure
    labels = {ax.get_ylabel() for ax in figure.axes}
    assert {"attention weight", style.NORM_LABELS["frobenius"]} <= labels


def test_refuses():
    with pytest.raises(InputError, match="there is no map to draw; give at least one variant"):
        plot.variants({})
    with pytest.raises(InputError, match=r"different norms \(frobenius, rms\); measure all variants with one"):
        plot.variants({"a": one(), "b": one(norm="rms")})
    with pytest.raises(InputError, match="the map of 'a' holds no attention weights"):
        plot.variants({"a": SensitivityMap(torch.ones(1, 3, 3))})
