"""Figures: what is drawn, in which colour and with which words; nothing is left with pyplot."""

from __future__ import annotations

import math
from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from drawn import example, rendered, words
from matplotlib.colors import to_rgb
from oracles import draw

from sensitivity import SoftmaxAttention, measure, plot, statistics
from sensitivity.errors import InputError
from sensitivity.fit import decay_exponent
from sensitivity.plot import style
from sensitivity.result import SensitivityMap

pytestmark = [pytest.mark.filterwarnings("error::UserWarning"), pytest.mark.filterwarnings("error::RuntimeWarning")]


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
