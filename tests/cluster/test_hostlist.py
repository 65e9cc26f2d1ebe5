import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfgpu.cluster.hostlist import expand
from tfgpu.errors import InputError


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        # Forms that Slurm's own `scontrol show hostnames` takes.
        ("localhost", "localhost"),
        ("node1,node2", "node1 node2"),
        ("gpu[01-03,7],login2", "gpu01 gpu02 gpu03 gpu7 login2"),
        ("node[1-2]", "node1 node2"),
        ("node[8-11]", "node8 node9 node10 node11"),
        ("node[098-101]", "node098 node099 node100 node101"),
        ("p[0037,0046]", "p0037 p0046"),
        ("r[1-2]n[01-03]", "r1n01 r1n02 r1n03 r2n01 r2n02 r2n03"),
        ("a[0-1]b[1,8]c[5-6]", "a0b1c5 a0b1c6 a0b8c5 a0b8c6 a1b1c5 a1b1c6 a1b8c5 a1b8c6"),
        ("[01-02]", "01 02"),
        ("gpu[1-2]-ib.cluster.local", "gpu1-ib.cluster.local gpu2-ib.cluster.local"),
        ("sh04-10n05,sh03-ln[08-09]", "sh04-10n05 sh03-ln08 sh03-ln09"),  # Stanford's Sherlock
        ("nid[001024-001025]", "nid001024 nid001025"),  # NERSC's Perlmutter
        ("c123-[001,101-102]", "c123-001 c123-101 c123-102"),  # TACC's Frontera
        ("10-0-3-12", "10-0-3-12"),
        ("GPU71E4", "GPU71E4"),
        (" n[1-2] , m ", "n1 n2 m"),
        ("n1,n1", "n1 n1"),
    ],
)
def test_slurms_forms(text, hosts):
    assert expand(text) == hosts.split()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "a name is missing"),
        ("n1,", "a name is missing"),
        ("n1,,n2", "a name is missing"),
        ("n[1-2", "closed brackets"),
        ("n1-2]", "closed brackets"),
        ("n[[1-2]]", "closed brackets"),
        ("n[1-2]]", "closed brackets"),
        ("n[a-c]", "closed brackets"),
        ("(null)", "closed brackets"),
        ("n 1", "closed brackets"),
        ("n[]", "neither a number"),
        ("n[1-]", "neither a number"),
        ("n[1-2-3]", "neither a number"),
        ("n[1,,2]", "neither a number"),
        ("n[3-1]", "runs backwards"),
        ("n[01-2]", "runs backwards"),
        ("n[0-99999999999999999]", "more than 65536"),
        ("a[1-300]b[1-300]", "more than 65536"),
        (",".join(["n[1-60000]"] * 2), "more than 65536"),
    ],
)
def test_a_malformed_list_is_quoted_beside_a_right_one(text, words):
    with pytest.raises(InputError) as caught:
        expand(text)
    assert words in str(caught.value)
    assert repr(text) in str(caught.value) and "gpu[01-03,7],login2" in str(caught.value)


@given(st.text(alphabet="n0129[],- ab(", max_size=12))
def test_any_value_is_read_or_refused(text):
    try:
        assert all(expand(text))
    except InputError as error:
        assert repr(text) in str(error)
