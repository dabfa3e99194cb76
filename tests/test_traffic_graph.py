"""Graph files: the right sub-graph, and no foreign code."""

import os
import pickle

import numpy as np
import pytest
import torch
from scipy import sparse

from sensitivity.errors import InputError
from sensitivity.traffic import gaussian_kernel, read_graph

IDS = ["11", "22", "33", "44"]
MATRIX = np.arange(16, dtype=np.float32).reshape(4, 4) / 16


def write_pickle(path, content, protocol=2):
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    return path


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("as_bytes", [False, True])
def test_pickles_of_any_protocol(tmp_path, protocol, order, as_bytes):
    names = [name.encode() for name in IDS] if as_bytes else IDS
    content = [names, {name: row for row, name in enumerate(names)}, np.array(MATRIX, order=order)]
    path = write_pickle(tmp_path / "adj.pkl", content, protocol)
    graph = read_graph(path, ["33", "11"])
    np.testing.assert_array_equal(graph.numpy(), MATRIX[np.ix_([2, 0], [2, 0])])
    assert graph.dtype == torch.float32


@pytest.mark.parametrize("module", ["numpy.core.multiarray", "numpy._core.multiarray"])
def test_a_pickle_of_python_2(tmp_path, module):
    raw = b"'" + "".join(f"\\x{byte:02x}" for byte in MATRIX.tobytes()).encode() + b"'"
    text = (
        b"(lp0\n(lp1\nS'11'\naS'22'\naS'33'\naS'44'\naa"
        b"(dp2\nS'11'\nI0\nsS'22'\nI1\nsS'33'\nI2\nsS'44'\nI3\nsa"
        b"c" + module.encode() + b"\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR(I1\n(I4\nI4\nt"
        b"cnumpy\ndtype\n(S'f4'\nI0\nI1\ntR(I3\nS'<'\nNNNI-1\nI-1\nI0\ntbI00\n" b"S" + raw + b"\ntba."
    )  # fmt: skip
    (tmp_path / "adj.pkl").write_bytes(text)
    np.testing.assert_array_equal(read_graph(tmp_path / "adj.pkl", IDS).numpy(), MATRIX)


class Planted:
    """What an attacker pickles: a call on loading."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("function", ["system", "eval", "open", "getattr"])
def test_a_planted_pickle_does_not_run(tmp_path, protocol, function):
    mark = tmp_path / "mark"
    planted = {
        "system": Planted(os.system, f"touch {mark}"),
        "eval": Planted(eval, f"open({str(mark)!r}, 'w')"),
        "open": Planted(open, str(mark), "w"),
        "getattr": Planted(getattr, "text", "upper"),
    }[function]
    path = write_pickle(tmp_path / "adj.pkl", [IDS, {name: row for row, name in enumerate(IDS)}, planted], protocol)
    with pytest.raises(InputError, match=r"asks for \S+, which could run foreign code, so it was not loaded"):
        read_graph(path, IDS)
    assert not mark.exists()
    with path.open("rb") as file:
        pickle.load(file)  # the payload is live: without the restriction it runs
    assert mark.exists() or function == "getattr"


def test_matrices_without_ids(tmp_path):
    np.save(tmp_path / "a.npy", MATRIX)
    np.savez(tmp_path / "a.npz", adj_mx=MATRIX, other=MATRIX[0])
    np.savetxt(tmp_path / "a.csv", MATRIX, delimiter=",")
    write_pickle(tmp_path / "a.pkl", MATRIX)
    for suffix in ("npy", "npz", "csv", "pkl"):
        np.testing.assert_allclose(read_graph(tmp_path / f"a.{suffix}", IDS).numpy(), MATRIX)
    with pytest.raises(InputError, match="has 4 nodes without ids, but the data has 3 sensors"):
        read_graph(tmp_path / "a.npy", IDS[:3])


def test_npz_with_ids_is_cut_to_the_data(tmp_path):
    np.savez(tmp_path / "a.npz", graph=MATRIX, sensor_ids=np.array(IDS))
    np.testing.assert_array_equal(read_graph(tmp_path / "a.npz", ["44", "22"]).numpy(), MATRIX[[3, 1]][:, [3, 1]])


def test_road_distances_become_weights(tmp_path):
    (tmp_path / "d.csv").write_text("from,to,cost\n11,22,100\n22,11,300\n11,11,0\n22,22,0\n99,11,5\n")
    distances = np.array([[0.0, 100.0], [300.0, 0.0]])
    np.testing.assert_allclose(read_graph(tmp_path / "d.csv", ["11", "22"]), gaussian_kernel(distances))
    with pytest.raises(InputError, match="lacks 1 of the data's 3 sensors"):
        read_graph(tmp_path / "d.csv", ["11", "22", "33"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from,to,distance\n11,22,100\n22,11,300\n", "kernel"),
        ("Source;Target;Cost\n11;22;100\n22;11;300\n", "kernel"),
        ("11,22,100\n22,11,300\n", "kernel"),  # as in PEMS-BAY's list of distances
        ("from,to,weight\n11,22,0.25\n22,11,0.75\n11,99,3\n", [[0, 0.25], [0.75, 0]]),
        ("from,to\n11,22\n", [[0, 1], [0, 0]]),
        (",22,11\n22,1,2\n11,3,4\n", [[4, 3], [2, 1]]),
        ("22,11\n1,2\n3,4\n", [[4, 3], [2, 1]]),
        ("1\t2\n3\t4\n", [[1, 2], [3, 4]]),
        ("1 2\n3 4\n", [[1, 2], [3, 4]]),
        ('"","11","22"\n"11",1,2\n"22",3,4\n', [[1, 2], [3, 4]]),
    ],
)
def test_graphs_in_text(tmp_path, text, expected):
    if expected == "kernel":
        expected = gaussian_kernel(np.array([[np.inf, 100.0], [300.0, np.inf]]))
        text += "11,99,500\n".replace(",", ";" if ";" in text else ",")  # a sensor that the data does not have
    (tmp_path / "g.csv").write_text(text)
    np.testing.assert_allclose(read_graph(tmp_path / "g.csv", ["11", "22"]), expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("from,to,colour\n11,22,1\n", "has the header 'from,to,colour'; edges are listed under from,to,cost"),
        ("from,to,cost\n11,22,far\n", "has '11,22,far' in line 2; from, to and a number >= 0 are expected there"),
        ("from,to,cost\n11,22,-1\n", "has '11,22,-1' in line 2"),
        ("from,to,cost\n11,22\n11\n", "has '11' in line 3"),
        ("77,88,1\n88,77,2\n", "lists edges between sensors such as '77', none of which the data has .* like '11'"),
        (",11,22\n11,1,2\n", "names 1 different nodes in its first line, but has 1 rows|cannot be read|not a square"),
        ("1,2\n3\n", "has 1 numbers instead of 2 in line 2, so it cannot be read as a graph"),
        ("from,to,cost\n", "lists no edges"),
    ],
)
def test_text_that_is_no_graph(tmp_path, text, message):
    (tmp_path / "g.csv").write_text(text)
    with pytest.raises(InputError, match=message):
        read_graph(tmp_path / "g.csv", ["11", "22"])


def test_sparse_matrices(tmp_path):
    sparse.save_npz(tmp_path / "a.npz", sparse.csr_matrix(MATRIX))
    np.testing.assert_array_equal(read_graph(tmp_path / "a.npz", IDS), MATRIX)


def test_planted_arrays_do_not_run(tmp_path):
    mark = tmp_path / "mark"
    objects = np.array([[Planted(os.mkdir, str(mark))]], dtype=object)
    np.save(tmp_path / "a.npy", objects, allow_pickle=True)
    np.savez(tmp_path / "a.npz", graph=objects)
    for name in ("a.npy", "a.npz"):
        with pytest.raises(InputError, match=r"cannot be read as a graph \(.*pickle"):
            read_graph(tmp_path / name, IDS)
    assert not mark.exists()


def test_data_without_ids_takes_the_graphs_order(tmp_path):
    path = write_pickle(tmp_path / "adj.pkl", [IDS, {name: row for row, name in enumerate(IDS)}, MATRIX])
    np.testing.assert_array_equal(read_graph(path, ["0", "1", "2", "3"], named=False).numpy(), MATRIX)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([IDS, {}, MATRIX], "contradicts itself: 4 ids, 0 indices, 4 matrix rows"),
        ({"a": 1}, r"holds a dict, not METR-LA's \[ids, id to index, matrix\]"),
        (MATRIX[:3], r"holds an array of shape \(3, 4\) and type float32, not a square matrix"),
        (-MATRIX, "holds weights that are negative or not finite"),
        (MATRIX * np.nan, "holds weights that are negative or not finite"),
    ],
)
def test_pickles_that_are_no_graph(tmp_path, content, message):
    with pytest.raises(InputError, match=message):
        read_graph(write_pickle(tmp_path / "adj.pkl", content), IDS)


def test_ids_that_do_not_match(tmp_path):
    path = write_pickle(tmp_path / "adj.pkl", [IDS, {name: row for row, name in enumerate(IDS)}, MATRIX])
    with pytest.raises(
        InputError, match=r"lacks 2 of the data's 3 sensors \(the first is '55'; its own ids look like '11'"
    ):
        read_graph(path, ["55", "11", "66"])


def test_files_that_are_no_graph(tmp_path):
    with pytest.raises(InputError, match=r"there is no file .*gone.pkl for the graph"):
        read_graph(tmp_path / "gone.pkl", IDS)
    with pytest.raises(InputError, match="is a directory; the graph is a file"):
        read_graph(tmp_path, IDS)
    (tmp_path / "a.txtx").write_text("1")
    with pytest.raises(InputError, match=r"its name must end in .pkl, .npy, .npz or .csv"):
        read_graph(tmp_path / "a.txtx", IDS)
    whole = pickle.dumps([IDS, {}, MATRIX])
    for content in (b"", b"garbage", whole[: len(whole) // 2]):
        (tmp_path / "a.pkl").write_bytes(content)
        with pytest.raises(InputError, match="is not a complete pickle"):
            read_graph(tmp_path / "a.pkl", IDS)
    (tmp_path / "a.csv").write_text("1,2\n3,x\n")
    with pytest.raises(InputError, match="cannot be read as a graph"):
        read_graph(tmp_path / "a.csv", IDS)
    np.savez(tmp_path / "a.npz", one=MATRIX, two=MATRIX)
    with pytest.raises(InputError, match="holds one, two; a graph is called 'graph' or 'adj_mx'"):
        read_graph(tmp_path / "a.npz", IDS)
