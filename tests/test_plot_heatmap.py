"""Heat maps: what is drawn, in which colour and with which words."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from drawn import background, example, rendered, words
from matplotlib.colors import LogNorm, to_rgb

from sensitivity import plot
from sensitivity.errors import InputError
from sensitivity.plot import style

pytestmark = [pytest.mark.filterwarnings("error::UserWarning"), pytest.mark.filterwarnings("error::RuntimeWarning")]


class TestHeatmap:
    @pytest.mark.parametrize("length", [1, 2, 3, 12, 96, 257, 1024])
    def test_draws_any_length_with_few_ticks_that_do_not_touch(self, length):
        ax = plot.heatmap(torch.rand(length, length, generator=torch.Generator().manual_seed(0)) + 0.1)
        boxes = rendered(ax)
        inside = [tick for tick in ax.get_yticks() if -0.5 <= tick <= length - 0.5]
        assert 1 <= len(inside) <= 10
        assert all(tick == int(tick) for tick in inside)
        assert all(left.x1 < right.x0 for left, right in pairwise(boxes))
        assert (ax.get_xlim(), ax.get_ylim()) == ((-0.5, length - 0.5), (length - 0.5, -0.5))

    def test_a_long_map_is_drawn_in_blocks_of_their_largest_value_and_says_so(self):
        norms = torch.full((1000, 1000), 0.1)
        norms[501, 7] = 5.0
        ax = plot.heatmap(norms, cells=100)
        image = np.asarray(ax.images[1].get_array())
        assert image.shape == (100, 100)
        assert np.argwhere(image == 5.0).tolist() == [[50, 0]]
        assert "each cell: largest of 10 x 10 pairs" in ax.images[1].colorbar.ax.get_ylabel()

    def test_a_length_that_blocks_do_not_divide_keeps_its_last_pairs(self):
        norms = torch.full((10, 10), 0.1)
        norms[9, 9] = 3.0
        image = np.asarray(plot.heatmap(norms, cells=4).images[1].get_array())
        assert image.shape == (4, 4)
        assert image[3, 3] == 3.0

    def test_queries_run_downwards_and_keys_to_the_right(self):
        norms = torch.full((3, 3), 1.0)
        norms[2, 0] = 9.0
        ax = plot.heatmap(norms)
        assert np.asarray(ax.images[1].get_array())[2, 0] == 9.0
        assert (ax.get_xlabel(), ax.get_ylabel()) == ("key time $j$ (step)", "query time $i$ (step)")

    def test_zeros_and_masked_pairs_have_their_own_colours_and_a_legend(self):
        norms, visible = torch.ones(3, 3), torch.ones(3, 3, dtype=torch.bool)
        norms[0, 1], visible[0, 2] = 0.0, False
        ax = plot.heatmap(norms, visible)
        assert background(ax)[0, 1] == pytest.approx(to_rgb(style.ZERO))
        assert background(ax)[0, 2] == pytest.approx(to_rgb(style.MASKED))
        assert ax.images[1].get_array().mask.tolist()[0] == [False, True, True]
        assert words(ax) == ["masked", "exactly zero"]

    def test_the_colours_reach_over_the_finite_positive_pairs(self):
        norms = torch.tensor([[0.0, 0.5], [2.0, 1.0]])
        norm = plot.heatmap(norms).images[1].norm
        assert isinstance(norm, LogNorm)
        assert (norm.vmin, norm.vmax) == (0.5, 2.0)

    def test_tiny_values_do_not_stretch_the_scale(self):
        ax = plot.heatmap(torch.tensor([[1.0, 1e-30], [1.0, 1.0]]))
        rendered(ax)
        assert ax.images[1].norm.vmin == pytest.approx(1e-6)
        assert ax.images[1].colorbar.extend == "min"

    @pytest.mark.parametrize(
        ("norms", "visible", "expected"),
        [
            (torch.zeros(4, 4), None, ["exactly zero"]),
            (torch.ones(4, 4), torch.zeros(4, 4, dtype=torch.bool), ["masked"]),
            (torch.full((4, 4), 3.0), None, []),
            (torch.full((1, 1), 1e-12), None, []),
        ],
    )
    @pytest.mark.parametrize("log", [True, False])
    def test_maps_without_a_range(self, norms, visible, expected, log):
        ax = plot.heatmap(norms, visible, log=log)
        rendered(ax)
        assert words(ax) == expected
        assert len(ax.images) == (1 if expected else 2)

    def test_of_a_map_takes_its_name_norm_mask_path_and_samples(self):
        found = example(causal=True, padded=2)
        ax = found.plot()
        assert ax.get_title() == "blocks.0.temporal"
        assert ax.images[1].colorbar.ax.get_ylabel() == "sensitivity (Frobenius norm)"
        assert float(ax.images[1].get_array()[5, 3]) == pytest.approx(float(found.norms[:, 5, 3].mean()))
        assert ax.images[1].get_array().mask[3, 5]
        path = plot.heatmap(found, path="key", sample=1)
        assert float(path.images[1].get_array()[5, 3]) == pytest.approx(float(found.paths["key"][1, 5, 3]))
        assert path.get_title() == "blocks.0.temporal (key path)"

    def test_equal_limits_make_maps_comparable(self):
        axes = [plot.heatmap(torch.full((2, 2), value), limits=(0.1, 10.0)) for value in (0.5, 2.0)]
        assert {(ax.images[1].norm.vmin, ax.images[1].norm.vmax) for ax in axes} == {(0.1, 10.0)}

    @pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
    def test_refuses_values_that_it_cannot_draw(self, value):
        norms = torch.ones(4, 4)
        norms[2, 3] = value
        with pytest.raises(InputError, match=rf"value at \(query, key\) = \(2, 3\) is {value}; .* with visible="):
            plot.heatmap(norms)
        visible = torch.ones(4, 4, dtype=torch.bool)
        visible[2, 3] = False
        assert words(plot.heatmap(norms, visible)) == ["masked"]

    def test_refuses_other_shapes(self):
        with pytest.raises(InputError, match=r"a heatmap needs \(query, key\) .* not the shape \(4,\)"):
            plot.heatmap(torch.ones(4))
        with pytest.raises(InputError, match=r"visible has shape \(2, 2\), but the map has \(4, 4\)"):
            plot.heatmap(torch.ones(4, 4), torch.ones(2, 2, dtype=torch.bool))
        with pytest.raises(InputError, match="there is no sample 2; the map has 2"):
            plot.heatmap(example(), sample=2)

    def test_the_legend_clears_the_axis_label_in_small_axes(self):
        ax = plot.grid(2, 3, 3.0, 2.6)[0, 0]
        plot.heatmap(example(96, causal=True), ax=ax)
        rendered(ax)
        assert ax.get_legend().get_window_extent().y1 <= ax.xaxis.label.get_window_extent().y0
