"""Secrets in tables, by hand: the cells below a secret name are removed, and tables of metrics stay as they are."""

import time

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tfgpu.redact import Cleaner


def cleaner():
    return Cleaner({}, user="adalovelace", home="/home/adalovelace", host="analytical.example.org")


# `§` stands for what is removed.
TABLES = {
    "CSV": (
        "user,password,note\nada,hunter2,x\nbob,two words,y\n\nuser, it stays, so\n",
        "user,password,note\nada,§,x\nbob,§,y\n\nuser, it stays, so\n",
    ),
    "quoted": ('a,pwd,b\n"x, y","it""s, so",z\n1,\'q\',2', 'a,pwd,b\n"x, y","§",z\n1,\'§\',2'),
    "a comma that should be quoted": (
        "user,password,note\nada,x1,1\nbob,pa,ss,2",
        "user,password,note\nada,§,1\nbob,§,2",
    ),
    "an empty cell": ("user,password\nada,\nbob,x1\n,x2\n", "user,password\nada,\nbob,§\n,§\n"),
    "a row without a frame": (
        "| user | pwd |\n|---|---|\nada | x1 |\nbob | x2\n| eve | x3",
        "| user | pwd |\n|---|---|\nada | § |\nbob | §\n| eve | §",
    ),
    "keys of AWS": (
        "User name,Password,Access key ID,Secret access key\r\nada,,AKIA1,wJalr/X\r\n",
        "User name,Password,Access key ID,Secret access key\r\nada,,§,§\r\n",
    ),
    "semicolons": ("user;passwort;api_key\na;b;c1", "user;passwort;api_key\na;§;§"),
    "tabs": ("id\tpassword\n1\thunter2\n2\t8731\n", "id\tpassword\n1\t§\n2\t§\n"),
    "one after another": (
        "a,secret\n1,x1\nb,c,d,token_secret\n1,2,3,y1\n",
        "a,secret\n1,§\nb,c,d,token_secret\n1,2,3,§\n",
    ),
    "names and values": ("name,value\napi_key,abc\nepochs,3\n", "name,value\napi_key,§\nepochs,3\n"),
    "a token": ("name,token,n\na,abcd1234efgh5678,3\nb,the,4", "name,token,n\na,§,3\nb,the,4"),
    "a key that looks random": ("layer,key\n1,a1b2c3d4e5f6a7b8\n2,conv1/kernel", "layer,key\n1,§\n2,conv1/kernel"),
    "Markdown": (
        "| user | password | tokens |\n|---|:---:|--:|\n| ada | `x y` | 12000 |\n| eve | a\\|b | |\n\n| it | stays |",
        "| user | password | tokens |\n|---|:---:|--:|\n| ada | § | 12000 |\n| eve | § | |\n\n| it | stays |",
    ),
    "Markdown without a frame": (
        "user | API key\n--- | ---\nada | abc\n | def",
        "user | API key\n--- | ---\nada | §\n | §",
    ),
    "Markdown's names and values": (
        "| variable | value |\n|---|---|\n| HF_TOKEN | abc |\n| EPOCHS | 3 |",
        "| variable | value |\n|---|---|\n| HF_TOKEN | § |\n| EPOCHS | 3 |",
    ),
    "one column": ("| password |\n|---|\n| x1 |\n| x2 |\n", "| password |\n|---|\n| § |\n| § |\n"),
    "MySQL": (
        "+------+----------+\n| user | password |\n+------+----------+\n| ada  | x1       |\n+------+----------+\n1 r",
        "+------+----------+\n| user | password |\n+------+----------+\n| ada  | §       |\n+------+----------+\n1 r",
    ),
    "PostgreSQL": (
        " user | password \n------+----------\n ada  | hunter2\n bob  | \n(1 row)",
        " user | password \n------+----------\n ada  | §\n bob  | \n(1 row)",
    ),
    "Rich": (
        "┏━━━━━━┳━━━━━━━━━┓\n┃ name ┃ api_key ┃\n┡━━━━━━╇━━━━━━━━━┩\n│ a    │ abcdefg │\n└──────┴─────────┘",
        "┏━━━━━━┳━━━━━━━━━┓\n┃ name ┃ api_key ┃\n┡━━━━━━╇━━━━━━━━━┩\n│ a    │ § │\n└──────┴─────────┘",
    ),
    "SQL": (
        "INSERT INTO users (name, password, n) VALUES ('ada', 'it''s, x', 3), ('bob', MD5('y'), 4); SELECT 1",
        "INSERT INTO users (name, password, n) VALUES ('ada', '§', 3), ('bob', §, 4); SELECT 1",
    ),
    "SQL's settings": (
        "insert into \"settings\" (name, value)\nvalues ('api_key', 'abc'), ('epochs', '3')",
        "insert into \"settings\" (name, value)\nvalues ('api_key', '§'), ('epochs', '3')",
    ),
}
KEPT = [
    "epoch,loss,tokens,tokens_per_s,token_accuracy,key,attn_key,sort_key\n1,0.5,12000,1234567,0.93,12345,0.31,a\n",
    "step;tokens;key\n1;2048;conv2d_1/kernel\n2;4096;optimizer/learning_rate\n",
    "token,id,count\nthe,5,12345\n##ing,6,2000\n[unused99],7,3\n",
    "image_key,label\nn01440764_10026,3\n00012345,4\n1f0c5a92-0a2b-8f1d-0f38-5a7b3b1f2c11,5\n",
    "suite,pass,fail\nunit,12/13,1\nslow,98 %,0\nall,7,0\n",
    "| model | tokens | tokens/s | time per token (ms) |\n|---|--:|--:|--:|\n| gpt | 1,024 | 12.5k | 1.2 ± 0.1 |\n",
    "| key | value |\n|---|---|\n| layers/conv2d_1/kernel | 0.3 |\n| optimizer.learning_rate | 1e-3 |\n",
    "| place | secret | API key |\n|---|---|---|\n| a log | yes | no |\n| a page | – | required |\n",
    "| test | token | auth |\n|---|---|---|\n| a | 12345 | ✓ |\n| b | <eos> | ✗ |\n",
    "name,kind,meaning\npassword,text,what the user says\nuser,text,who\n",
    "| type | condition to pass | max tokens |\n|---|---|---|\n| string | the same text | 512 |",
    "Enter your user name, password\nThen press enter, and wait",
    "    user, api_key,\n    host, port,\n)",
    "def attend(query, key, value):\n    return query, key\n    pass",
    "loss, token\n0.5, 0.3\n",
    "INSERT INTO runs (name, tokens, key) VALUES ('resnet', 12000, 'conv1/kernel'), ('vit', 5, '')",
    "a | b or password\nc | d",
]


@pytest.mark.parametrize(("text", "expected"), TABLES.values(), ids=TABLES)
def test_the_cells_below_secret_names_alone_are_removed(text, expected):
    expected = expected.replace("§", "<removed>")
    assert cleaner().hide(text) == expected
    assert cleaner().hide(f"epochs 3\n\n{text}\n\nloss 0.5") == f"epochs 3\n\n{expected}\n\nloss 0.5"


@pytest.mark.parametrize("text", KEPT)
def test_other_tables_are_kept(text):
    assert cleaner().hide(text) == text


names = st.sampled_from(["password", "API_KEY", "accessToken", "client secret", "pwd", "Secret access key", "auth"])
cells = st.text("abcXYZ0189 _/+=.:", min_size=6, max_size=30).filter(lambda it: len(set(it)) > 4 and it == it.strip())
words = st.text("abcdefgh", min_size=1, max_size=8)


@given(names, st.lists(cells, min_size=1, max_size=4), words, st.sampled_from([",", ";", "\t", " | "]), st.booleans())
def test_no_cell_below_a_secret_name_survives(name, secrets, other, mark, first):
    def row(secret, beside):
        return mark.join([secret, beside] if first else [beside, secret])

    assume(not any(secret in other or secret in name or secret in "<removed>" for secret in secrets))
    rule = ["--- | ---"] if "|" in mark else []
    table = "\n".join([row(name, "column"), *rule, *(row(secret, other) for secret in secrets)])
    cleaned = cleaner().hide(table)
    assert not any(secret in cleaned for secret in secrets if not secret.replace(".", "").isdecimal())
    assert cleaned.count(other) >= len(secrets)


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        ("", "a,"),
        ("", "password,b\n"),
        ("password,b\n", "x,y\n"),
        ("password,b\n", "x,y,z\n"),
        ("password,b\n", ',"'),
        ("password,b\n", ',""'),
        ("password,b\n", ',"""a'),
        ("password,b\n", "x," * 100 + "\n"),
        ("password\t", "b\t"),
        ("", "| password | b |\n|---|---|\n"),
        ("| password | b |\n|---|---|\n", "| x | y |\n"),
        ("| password | b |\n|---|---|\n", "|"),
        ("", "|-"),
        ("|a|\n", "-:"),
        ("", "│"),
        ("a,password\nb,", "1 "),
        ("a,token\nb,", "1 ± "),
        ("", "insert into a (b) values "),
        ("insert into a (password) values ", "('x'), "),
        ("insert into a (password) values (", "'x', "),
        ("insert into a (password) values (", "(("),
        ("insert into a (", "password, "),
    ],
)
def test_no_table_takes_long(begin, piece):
    text = begin + piece * (120_000 // len(piece))
    began = time.process_time()
    cleaner().clean(f"{text}\napi_key=abc")
    assert time.process_time() - began < 2
