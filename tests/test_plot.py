"""Figures: what is drawn, in which colour and with which words; nothing is left with pyplot."""

from __future__ import annotations

import math
from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.colors import LogNorm, to_rgb
from oracles import draw

from sensitivity import SoftmaxAttention, measure, plot, statistics
from sensitivity.errors import InputError
from sensitivity.fit import decay_exponent
from sensitivity.plot import style
from sensitivity.result import SensitivityMap

pytestmark = [pytest.mark.filterwarnings("error::UserWarning"), pytest.mark.filterwarnings("error::RuntimeWarning")]


def example(length=12, causal=False, padded=0, samples=2):
    real = (torch.arange(length) >= padded).expand(samples, length)
    visible = real[:, :, None] & real[:, None, :]
    if causal:
        visible = visible & torch.ones(length, length, dtype=torch.bool).tril()
    norms = (draw(samples, length, length).abs() + 0.1) * visible
    attention = draw(samples, 3, length, length).masked_fill(~visible[:, None], -math.inf).softmax(-1).nan_to_num()
    return SensitivityMap(
        norms,
        diagonal=draw(samples, length, seed=1).abs(),
        paths={"residual": torch.eye(length).expand(samples, -1, -1).double(), "value": norms, "key": 2 * norms},
        attention=attention,
        visible=visible,
        name="blocks.0.temporal",
    )


def words(ax):
    legend = ax.get_legend()
    return [text.get_text() for text in legend.get_texts()] if legend else []


def rendered(ax):
    """Draws the figure, which is where bad scales and ticks fail; returns its text boxes by axis."""
    figure = ax.figure
    figure.canvas.draw()
    return [label.get_window_extent() for label in ax.get_xticklabels() if label.get_text()]


def background(ax):
    return np.asarray(ax.images[0].get_array())


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


class TestDecay:
    lengths = (8, 16, 32, 64, 128)

    def values(self, exponent, samples=6):
        noise = torch.exp(0.1 * draw(samples, len(self.lengths)))
        return 3 * torch.tensor(self.lengths, dtype=torch.float64) ** -exponent * noise

    def test_draws_means_bands_fits_bounds_and_the_reference(self):
        off, diagonal = self.values(1.0), self.values(0.0)
        fits = {"off_diagonal": decay_exponent(self.lengths, off), "diagonal": decay_exponent(self.lengths, diagonal)}
        bounds = {"local": [9.0, 5.0, 2.0, 1.0, 0.5]}
        ax = plot.decay(self.lengths, off, diagonal, bounds, fits)
        rendered(ax)
        lines = {line.get_label(): line for line in ax.lines}
        labels = words(ax)
        low, high = fits["off_diagonal"].interval
        off_label = f"off the diagonal: $b$ = {fits['off_diagonal'].exponent:.2f} [{low:.2f}, {high:.2f}]"
        assert off_label in labels
        assert [label for label in labels if "10 to 90" in label] == ["10 to 90 % of samples"]
        assert {"bound: local", "slope $1/T$", "fitted $T^{-b}$"} <= set(labels)
        assert lines[off_label].get_ydata().tolist() == pytest.approx(off.mean(0).tolist())
        assert lines["bound: local"].get_ydata().tolist() == bounds["local"]
        reference = lines["slope $1/T$"].get_ydata()
        assert reference[0] / reference[-1] == pytest.approx(128 / 8)
        assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")

    def test_lengths_in_any_order(self):
        off = self.values(1.0)
        ax = plot.decay(self.lengths[::-1], off.flip(1))
        assert ax.lines[0].get_xdata().tolist() == list(self.lengths)
        assert ax.lines[0].get_ydata().tolist() == pytest.approx(off.mean(0).tolist())

    def test_leaves_out_what_has_no_logarithm_and_says_so(self):
        off = self.values(1.0)
        off[:, 0] = math.nan
        assert plot.decay(self.lengths, off).lines[0].get_xdata().tolist() == [16, 32, 64, 128]
        ax = plot.decay(self.lengths, torch.zeros(2, 5), torch.zeros(2, 5))
        rendered(ax)
        assert "off the diagonal: exactly zero or undefined" in words(ax)

    def test_one_sample_at_one_length(self):
        ax = plot.decay([12], [[0.5]], [[2.0]])
        rendered(ax)
        assert "10 to 90 % of samples" not in words(ax)

    def test_many_lengths_have_ticks_that_do_not_touch(self):
        lengths = list(range(4, 129, 4))
        ax = plot.decay(lengths, 1 / torch.tensor(lengths)[None])
        boxes = rendered(ax)
        assert all(left.x1 < right.x0 for left, right in pairwise(boxes))

    def test_refuses_arrays_that_do_not_fit(self):
        with pytest.raises(InputError, match=r"off_diagonal has shape \(6, 4\), but 5 lengths need \(sample, 5\)"):
            plot.decay(self.lengths, self.values(1.0)[:, :4])
        with pytest.raises(InputError, match=r"bound 'local' has shape \(1, 2\)"):
            plot.decay(self.lengths, self.values(1.0), bounds={"local": [1.0, 2.0]})


class TestPathShares:
    def test_stacks_the_shares_of_every_layer_to_one(self):
        found = example()
        shares = {"first": statistics.path_shares(found.paths), "second": found}
        ax = plot.path_shares(shares)
        rendered(ax)
        assert words(ax) == ["residual", "value", "key"]
        assert [label.get_text() for label in ax.get_yticklabels()] == [
            "first, on",
            "first, off",
            "second, on",
            "second, off",
        ]
        widths = np.array([[bar.get_width() for bar in container] for container in ax.containers])
        assert widths.sum(axis=0) == pytest.approx(1.0)
        assert widths[:, 1] == pytest.approx([0, 1 / 3, 2 / 3])
        assert widths[0, 0] == pytest.approx(float(found.path_shares()["diagonal"]["residual"]))
        assert to_rgb(ax.containers[1][0].get_facecolor()) == to_rgb(style.PATH_COLOURS["value"])

    def test_of_lengths_and_of_one_part(self):
        ax = plot.path_shares({T: example(T) for T in (6, 12)}, part="off_diagonal")
        assert [label.get_text() for label in ax.get_yticklabels()] == ["T=6", "T=12"]
        assert ax.get_xlabel() == "share of the sensitivity off the diagonal, by path"

    def test_shares_that_are_undefined_are_said_to_be(self):
        ax = plot.path_shares({"dead": statistics.path_shares({"value": torch.zeros(1, 3, 3)})})
        rendered(ax)
        assert [text.get_text() for text in ax.texts] == ["no sensitivity"] * 2

    def test_refuses(self):
        with pytest.raises(InputError, match="no path shares to draw"):
            plot.path_shares({})
        with pytest.raises(InputError, match="unknown part 'upper'; choose diagonal, off_diagonal"):
            plot.path_shares(example(), part="upper")


class TestProfiles:
    @pytest.mark.parametrize("length", [1, 2, 12, 96])
    @pytest.mark.parametrize("causal", [False, True])
    def test_lag_profile_raw_and_residual_removed(self, length, causal):
        found = example(length, causal)
        ax = plot.lag_profile(found)
        rendered(ax)
        raw = next(line for line in ax.lines if line.get_label() == "raw")
        assert raw.get_xdata().tolist() == list(range(1 - length, length))
        assert np.array_equal(raw.get_ydata(), found.lag_profile().values, equal_nan=True)
        assert words(ax) == ["raw", "residual removed"]
        assert ax.get_xlabel() == "lag $i - j$ (steps)"

    def test_primacy_profile(self):
        found = example()
        ax = plot.primacy_profile(found)
        rendered(ax)
        assert ax.lines[1].get_ydata().tolist() == pytest.approx(found.primacy_profile(residual_removed=True).values)
        assert ax.get_xlabel() == "key time $j$ (step)"

    def test_zeros_are_counted_where_the_axis_cannot_show_them(self):
        ax = plot.lag_profile([0.0, 1.0, 0.5], label="raw")
        assert words(ax) == ["raw, 1 exact zeros not shown"]

    @pytest.mark.parametrize("draw_profile", [plot.lag_profile, plot.primacy_profile])
    def test_a_profile_of_zeros_is_drawn_at_zero(self, draw_profile):
        ax = draw_profile(torch.zeros(5))
        rendered(ax)
        assert ax.get_yscale() == "linear"
        assert ax.lines[0].get_ydata().tolist() == [0.0] * 5

    def test_refuses_other_shapes(self):
        with pytest.raises(InputError, match=r"a lag profile has the shape \(2T - 1,\), not \(4,\)"):
            plot.lag_profile(torch.ones(4))
        with pytest.raises(InputError, match=r"a primacy profile has the shape \(key,\), not \(2, 2\)"):
            plot.primacy_profile(torch.ones(2, 2))


class TestAttention:
    def test_draws_one_head_or_the_mean(self):
        found = example(causal=True)
        one, mean = plot.attention(found, head=2), plot.attention(found)
        assert float(one.images[1].get_array()[5, 3]) == pytest.approx(float(found.attention[:, 2, 5, 3].mean()))
        assert float(mean.images[1].get_array()[5, 3]) == pytest.approx(float(found.attention[:, :, 5, 3].mean()))
        assert (one.get_title(), mean.get_title()) == (
            "blocks.0.temporal: head 2",
            "blocks.0.temporal: mean of all heads",
        )
        assert one.images[1].get_array().mask[3, 5]

    def test_diagonal_mass_of_every_head_against_uniform_attention(self):
        found = example(causal=True)
        ax = plot.diagonal_mass(found)
        rendered(ax)
        mass = found.diagonal_attention()
        assert [bar.get_height() for bar in ax.patches] == pytest.approx(mass.heads.tolist())
        assert set(ax.lines[0].get_ydata()) == {mass.null}
        assert f"uniform attention: {mass.null:.3g}" in words(ax)

    def test_takes_bare_weights(self):
        weights = draw(1, 2, 5, 5).softmax(-1)
        assert len(plot.diagonal_mass(weights).patches) == 2
        assert plot.attention(weights, head=1).get_title() == "head 1"

    def test_refuses(self):
        with pytest.raises(InputError, match="there is no head 3; the layer has 3"):
            plot.attention(example(), head=3)
        with pytest.raises(InputError, match="holds no attention weights; measure an attention layer"):
            plot.attention(SensitivityMap(torch.ones(1, 2, 2)))
        with pytest.raises(InputError, match=r"have the axes \(sample, head, query, key\), not \(2, 2\)"):
            plot.diagonal_mass(torch.ones(2, 2))


DRAWN = {
    "heatmap": lambda ax=None: plot.heatmap(example(), ax=ax),
    "decay": lambda ax=None: plot.decay([8, 16], [[2.0, 1.0]], ax=ax),
    "path_shares": lambda ax=None: plot.path_shares(example(), ax=ax),
    "lag_profile": lambda ax=None: plot.lag_profile(example(), ax=ax),
    "primacy_profile": lambda ax=None: plot.primacy_profile(example(), ax=ax),
    "attention": lambda ax=None: plot.attention(example(), ax=ax),
    "diagonal_mass": lambda ax=None: plot.diagonal_mass(example(), ax=ax),
}


@pytest.mark.parametrize("name", list(DRAWN))
class TestEveryFigure:
    def test_draws_on_given_axes_and_returns_them(self, name):
        ax = plot.grid(1, 2)[0, 1]
        assert DRAWN[name](ax) is ax

    def test_leaves_nothing_with_pyplot_and_no_style_behind(self, name):
        before = dict(plt.rcParams)
        DRAWN[name]()
        assert plt.get_fignums() == []
        assert dict(plt.rcParams) == before

    def test_is_saved_in_every_format_and_leaves_no_other_file(self, name, tmp_path):
        ax = DRAWN[name]()
        for suffix in (".png", ".svg", ".pdf"):
            plot.save(ax, tmp_path / f"figure{suffix}")
        assert {path.name for path in tmp_path.iterdir()} == {"figure.png", "figure.svg", "figure.pdf"}
        assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
        assert b"</svg>" in (tmp_path / "figure.svg").read_bytes()
        assert (tmp_path / "figure.pdf").read_bytes().startswith(b"%PDF")


def test_the_same_figure_gives_the_same_files(tmp_path):
    for name in ("first", "second"):
        ax = plot.heatmap(example(causal=True))
        for suffix in ("svg", "pdf"):
            plot.save(ax.figure, tmp_path / f"{name}.{suffix}")
    for suffix in ("svg", "pdf"):
        assert (tmp_path / f"first.{suffix}").read_bytes() == (tmp_path / f"second.{suffix}").read_bytes()


def test_refuses_other_suffixes(tmp_path):
    with pytest.raises(InputError, match=r"figures are written as \.png, \.svg, \.pdf; end the name in one"):
        plot.save(plot.heatmap(torch.ones(2, 2)), tmp_path / "figure.jpg")
    assert list(tmp_path.iterdir()) == []


def test_path_colours_differ_for_the_colour_blind():
    """Luminance alone must separate neighbours in a stack; hue is lost to some readers."""
    luminance = [np.dot(to_rgb(style.PATH_COLOURS[name]), (0.2126, 0.7152, 0.0722)) for name in style.PATH_COLOURS]
    assert all(abs(a - b) > 0.1 for a, b in pairwise(luminance))


def some_rows(keep="map"):
    layer = SoftmaxAttention.random(8, 2, dtype=torch.float64)
    return measure(layer, draw(2, 40, 8), paths=True, rows=[31, 4, 17], keep=keep)


class TestOfSomeRows:
    def test_the_heatmap_shows_their_query_times_in_order(self):
        found = some_rows()
        ax = plot.heatmap(found)
        rendered(ax)
        assert [label.get_text() for label in ax.get_yticklabels() if label.get_text()] == ["4", "17", "31"]
        assert ax.get_ylabel().endswith("3 rows")
        image = np.asarray(ax.images[1].get_array())
        assert image[0] == pytest.approx(found.mean()[1].numpy())

    def test_statistics_are_drawn_like_the_map(self):
        whole, statistics = some_rows(), some_rows("statistics")
        for draws in (plot.lag_profile, plot.primacy_profile):
            lines = [[line.get_ydata() for line in draws(found).lines] for found in (whole, statistics)]
            for one, other in zip(*lines, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-12)
        for draws in (plot.path_shares, plot.diagonal_mass):
            one, other = (draws(found).patches for found in (whole, statistics))
            sizes = [[(patch.get_width(), patch.get_height()) for patch in patches] for patches in (one, other)]
            np.testing.assert_allclose(*sizes, rtol=1e-12)

    def test_statistics_have_no_map_and_no_weights_to_draw(self):
        with pytest.raises(InputError, match="statistics hold no map to draw; measure with keep='map', or some query"):
            plot.heatmap(some_rows("statistics"))
        with pytest.raises(InputError, match="holds no attention weights"):
            plot.attention(some_rows("statistics"))
