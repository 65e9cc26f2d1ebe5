"""Secrets of the kinds in docs/explained/security.md never survive, whatever surrounds them; other text does."""

import json
import re
import string
import urllib.parse

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tfgpu.redact import REMOVED, Cleaner, is_secret

ABOUT = {"user": "adalovelace", "home": "/home/adalovelace", "host": "analytical.example.org"}
LETTERS = string.ascii_letters + string.digits
COMMIT = "3f786850e387550fdab836ed7e6dc881de23001b"


def is_random(text):
    return len(set(text)) > 5 and any(map(str.isdigit, text)) and any(map(str.isalpha, text)) and "removed" not in text


secrets = st.text(LETTERS, min_size=12, max_size=40).filter(is_random)
texts = st.text(st.characters(blacklist_categories=["Cs"]), max_size=40)
names = st.sampled_from(
    ["API_KEY", "HF_TOKEN", "password", "db-password", "accessToken", "client_secret", "AWS_SECRET_ACCESS_KEY"]
    + ["apikey", "wandb_api_key", "auth", "Authorization", "PRIVATE_KEY", "DATABASE_PASSWD", "session_cookie", "pwd"]
)
ASSIGNED = [
    "{name}={secret}",
    "export {name}='{secret}'",
    '{{"{name}": "{secret}", "epochs": 3}}',
    "{{'{name}': '{secret}'}}",
    "{name}: {secret}",
    "  {name}: {secret}",
    '  "{name}": {secret},',
    "- {name}: {secret}",
    '{name} = "{secret}"',
    "{name} = f'{secret}'",
    '{name} = """{secret}"""',
    "{name} := {secret}",
    "os.environ['{name}'] = '{secret}'",
    "https://host/path?x=1&{name}={secret}&y=2",
    "train.py --{name} {secret} --epochs 3",
    "train.py --{name}={secret}",
    "train.py --{name} \\\n  {secret}",
    "args: --{name} {secret}",
    "['train.py', '--{name}', '{secret}']",
    '["train.py", "--{name}", "{secret}", "--epochs", "3"]',
    '["train.py","--{name}","{secret}"]',
    "args:\n  - --{name}\n  - {secret}\n",
    'args:\n  - "--{name}"\n  - "{secret}"\n',
    '{{"text": "epochs: 3\\n{name}={secret}"}}',
    "key=load(path, {name}={secret})",
    "pass: 3 of 4, {name}={secret}",
    "\x1b[36m{name}\x1b[0m=\x1b[35m{secret}\x1b[0m",
]
# Of a name that means nothing but a secret, several words go too.
SEVERAL = [
    "password: two words {secret}",
    "password = 'two words {secret}'",
    '{{"client_secret": "two, words {secret}"}}',
    "password='it'\"'\"'s {secret}'",
    "password: 'it''s {secret}'",
    'tokens: 5, API_KEY="a\\"b{secret}"',
    "api_key=(1, {secret})",
    'credentials: ["{secret}", "{secret}"]',
    "password=a&{secret}",
    "password=a'b{secret}",
    "password=a,b{secret}",
]
BARE = [
    "https://me:{secret}@host/simple",
    "https://{secret}@github.com/a/b.git",
    "s3://key:{secret}@bucket/data",
    "redis://:{secret}@host:6379/0",
    "postgres://me:a/{secret}@host/db",
    "postgres://me:a@{secret}@host/db",
    "Authorization: Bearer {secret}",
    "Authorization: Basic {secret}",
    "curl -H 'Authorization: Bearer {secret}' https://host",
    "curl -H 'X-Who: Bearer {secret}'",
    "hf_{secret}",
    "ghp_{secret}",
    "github_pat_{secret}",
    "glpat-{secret}",
    "sk-{secret}",
    "sk-proj-{secret}",
    "xoxb-{secret}",
    "gsk_{secret}",
    "wandb_v1_{secret}",
    "wandb login {secret}y1234567",
    "https://hooks.slack.com/services/T00000000/B00000000/{secret}",
    "https://discord.com/api/webhooks/123456/{secret}",
    "-----BEGIN RSA PRIVATE KEY-----\n{secret}\n-----END RSA PRIVATE KEY-----",
    "-----BEGIN OPENSSH PRIVATE KEY-----\n{secret}\n{secret}",
    "eyJhbGciOiJIUzI1NiJ9.{secret}.{secret}",
]
COMMANDS = [
    "mysql -u root -p{secret} db",
    "mysqldump -uroot -p'two words {secret}' db",
    "curl -u me:{secret} https://host/x",
    "curl -sSume:{secret} --user 'me:{secret}' https://host/x",
    "sshpass -p {secret} ssh host",
    "docker login -u me -p {secret} registry",
    "echo {secret} | docker login -u me --password-stdin",
    "echo '{secret}' | sudo -S ls",
    "train.py -p 'two words {secret}'",
    "PGPASSWORD={secret} psql",
    "redis-cli -h host -a {secret} ping",
    "ldapsearch -x -D cn=me -w {secret}",
    "openssl rsa -passin pass:{secret} -in key",
    "htpasswd -bc file me {secret}",
    "mongosh -u me -p {secret}",
    "smbclient //host/share -U me%{secret}",
    "unzip -P {secret} a.zip",
    "ssh-keygen -N {secret}",
    "wget --http-password {secret} https://host",
    "kubectl create secret generic x --from-literal=key={secret}",
    "['sshpass', '-p', '{secret}', 'ssh', 'host']",
    '["curl", "-u", "me:{secret}"]',
]
BARE += COMMANDS


def cleaner():
    return Cleaner({}, **ABOUT)


@given(st.sampled_from(ASSIGNED), names, secrets, texts, texts)
def test_the_value_of_a_secret_name_is_removed(form, name, secret, before, after):
    assume(secret not in before + after)
    assert secret not in cleaner().hide(f"{before}\n{form.format(name=name, secret=secret)}\n{after}")


@given(st.sampled_from(SEVERAL), secrets, texts, texts)
def test_a_value_of_several_words_is_removed_whole(form, secret, before, after):
    assume(secret not in before + after)
    assert secret not in cleaner().hide(f"{before}\n{form.format(secret=secret)}\n{after}")


@given(st.sampled_from(BARE), secrets, texts, texts)
def test_a_known_form_of_secret_is_removed(form, secret, before, after):
    assume(secret not in before + after)
    assert secret not in cleaner().hide(f"{before}\n{form.format(secret=secret)}\n{after}")


@pytest.mark.parametrize("text", ["AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"])  # AWS's own
def test_keys_of_aws_are_removed(text):
    assert text not in cleaner().hide(f"with {text} in")


@given(st.sampled_from(ASSIGNED + BARE), names, secrets, st.integers(1, 4), st.booleans())
def test_json_within_json_is_cleaned(form, name, secret, depth, cut):
    """Settings in an environment in a pod's log look like this; a log may end in the middle of one."""
    # JSON escapes colors; half a URL has no `@`, half a token is none, and half a pipe tells not who reads it.
    assume("\x1b" not in form and not (cut and re.search(r"@|\{secret\}(\w|.* \|)", form)))
    text = form.format(name=name, secret=secret)
    for _ in range(depth):
        text = json.dumps({"epochs": 3, "text": text, "then": "x"})
    assert secret not in cleaner().hide(text[: text.rindex(secret) + len(secret)] if cut else text)


@given(names, secrets, st.integers(1, 400), st.sampled_from(["a: ", "a=", "x y ", 'a="', "--b ", "key="]))
def test_what_stands_before_on_the_line_does_not_matter(name, secret, count, around):
    assert secret not in cleaner().hide(around * count + f"{name}={secret}")


@given(
    st.text(st.characters(blacklist_categories=["Cs"]), min_size=8, max_size=30).filter(lambda it: len(set(it)) > 5),
    st.sampled_from(
        [json.dumps, repr, urllib.parse.quote_plus]
        + [lambda x: json.dumps(x, ensure_ascii=False), lambda x: urllib.parse.quote(x, "")]
    ),
)
def test_the_value_of_a_secret_variable_is_removed_however_it_is_written(secret, written):
    assume(secret not in REMOVED)
    cleaned = Cleaner({"MY_TOKEN": secret}, **ABOUT).clean(f"x {written(secret)} y")
    assert written(secret).strip("\"'\\") not in cleaned


@given(st.text(string.printable, min_size=4, max_size=30).filter(str.strip), texts, texts, names)
def test_the_value_of_a_secret_variable_is_removed_wherever_it_stands(secret, before, after, name):
    assume(secret not in REMOVED and secret not in "<user><host>~")
    cleaned = Cleaner({name: secret}, **ABOUT).clean(f"{before}{secret}{after}{secret}")
    assert secret not in cleaned.replace(REMOVED, "")


def test_the_shell_s_directory_is_no_secret():
    made = Cleaner({"PWD": "/work/digits", "OLDPWD": "/work", "DB_PWD": "/work/hunter2"}, home="/home/ada", host="box")
    assert made.clean("/work/digits/train.py /work/x") == "/work/digits/train.py /work/x"
    assert made.clean("pwd=hunter2x at /work/hunter2") == "pwd=<removed> at <removed>"


@given(texts, st.sampled_from(["/home/adalovelace/runs", "adalovelace@analytical", "analytical.example.org:2222"]))
def test_user_and_machine_are_removed_from_a_bundle(before, text):
    cleaned = cleaner().clean(f"{before} {text} {before}")
    assert "adalovelace" not in cleaned and "analytical" not in cleaned


@given(texts, st.lists(st.tuples(names, secrets), max_size=3))
def test_cleaning_twice_changes_nothing_more(text, pairs):
    once = cleaner().clean(text + "\n".join(f"{name}={secret}" for name, secret in pairs))
    assert cleaner().clean(once) == once


values = st.recursive(
    secrets | st.integers() | st.none() | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
)


@given(st.dictionaries(names, values), st.dictionaries(st.sampled_from(["epochs", "lr", "model"]), st.integers()))
def test_facts_stay_facts(hidden, shown):
    made = cleaner().facts(hidden | shown)
    assert {name: made[name] for name in shown} == shown and made.keys() == hidden.keys() | shown.keys()
    assert not set(json.dumps(made).split('"')) & {
        each for each in json.dumps(hidden).split('"') if is_random(each)
    } - {
        *hidden,
        *json.dumps(list(hidden)).split('"'),
    }


@pytest.mark.timeout(120)  # a search that goes back from each letter takes hours
@pytest.mark.sample(24)
@pytest.mark.parametrize(
    "piece",
    ["a: ", "a=", "a.", "a-", "a", "_", "-", "x@", "a:", 'a="', "a='\"", "a ", "Aa1+", "A\n", "--a ", "--token ", "\\"]
    + ['\\"', 'a\\":', '"\\"', '"a", ', "a\n - ", "eyJ", "eyJ-", "eyJa.", "0a1b", "key=", "key: ", 'key="', "token=$a "]
    + ["token=none ", "password: ", "password=(", '"password": {', "://a:", "://a:b/", "://a:@", "Bearer ", "bearer a"]
    + ["-----BEGIN PRIVATE KEY", "AKIA", "hf_", "sk-", " == ", "a == ", "secret\t", "\x1b[36m", "wandb login ", "\\n"]
    + ["mysql ", "mysql -p", "login -p '", "-u a:", "echo a ", "echo a|", '-p "', "htpasswd -b "],
)
@pytest.mark.parametrize("begin", ["", "://", 'password="'])
def test_no_text_takes_long(piece, begin):
    text = begin + piece * (120_000 // len(piece))
    assert "abc" not in cleaner().clean(f"{text}\napi_key=abc")


@pytest.mark.parametrize(
    "text",
    [
        "epochs: 3\nglobal_batch: 1024\nmodel: resnet\nlearning_rate: 1e-3\n",
        "epoch,loss,accuracy\n1,0.53,0.81\n",
        "tensorflow==2.21.0\ntokenizers==0.21\nkeras==3.15.1\ngoogle-auth==2.38.0\ntiktoken==0.8.0\nSecretStorage==3.3.3",
        "max_tokens=512 tokenizer: bert key_dim=64 num_keys=3 pad_token_id: 0, eos_token: </s>",
        "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1f0c5a92-0a2b-8f1d-0f38-5a7b3b1f2c11)",
        "symbol: _ZN10tensorflow15BaseGPUDevice4InitERKNS_14SessionOptionsE12345",
        "/usr/lib/x86_64-linux-gnu/libcudnn.so.9: cannot open shared object file: No such file or directory",
        'NCCL_DEBUG=INFO\nTF_CONFIG={"cluster": {"worker": ["a:1", "b:2"]}}',
        "I0000 00:00:1795418836.294959   30361 cudart_stub.cc:31] Could not find cuda drivers on your machine",
        f"commit {COMMIT}",
        f"HEAD is now at {COMMIT}\n{COMMIT} One\n{COMMIT[::-1]} Two",
        f'"git_commit": "{COMMIT}", index {COMMIT}..{COMMIT} 100644, {COMMIT}\trefs/heads/main',
        "docker run -u 1000:1000 -p 8080:80 image@sha256:" + "0a1b" * 16,
        "python -u train.py; ssh -p 2222 host; mkdir -p a/b; mysql: done",
        "password authentication failed; the passphrase must be given",
        "ssh -p 22 host; srun -p gpu -w node1 x; ps -u ada; cp -a a b; docker run -p 8080:80 -u 0:0 x; nmap -p 80 host",
        "mysql -u root -p db; tar -P -czf x; grep -w word a; mkdir -p a; python -u -m pytest -p no:x; scp -P 22 a b:c",
        "group_key=1 instance_key=107, pass: 3 of 4",
        '{"loss": 0.5, "token_accuracy": 0.93, "step_time_s": 0.1, "key": [0, 42]}',
        "    key = self._key_dense(key)\n    out = attention(query=query, value=value, key=key)",
        "  • key=tf.Tensor(shape=(2, 4), dtype=float32)\nsorted(rows, key=lambda row: row[1])",
        "input_signature=(TensorSpec(shape=(), dtype=tf.int32),) signature: serving_default",
        'attr { key: "T" value { type: DT_FLOAT } } checkpoint_key: "model/x/.ATTRIBUTES/VARIABLE_VALUE"',
        "Basic training loop, token classification, Digest authentication, the password is hidden",
        "functional_1_1_MultiHeadAttention_2_1_QueryDense_BiasAdd_ReadVariableOp_resource",
        "env:\n- name: HF_TOKEN\n  valueFrom:\n    secretKeyRef:\n      name: hf\n      key: token\n",
        "https://host:8080/users/@me and http://localhost:6006/x@y, docker://host:5000/image@sha256:abc",
        "https://medium.com/@user/x s3://bucket/a@b http://[::1]:8080/x@y",
        "SSH_AUTH_SOCK=/tmp/ssh-x/agent.1 imagePullSecrets: hf",
        'TOKEN=$HF_TOKEN "password": "", "token": null, secret=',
    ],
)
def test_what_a_bug_report_needs_is_kept(text):
    assert cleaner().clean(text) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("api_key=abc, epochs=3", "api_key=<removed>, epochs=3"),
        ('{"token": "abc", "epochs": 3}', '{"token": "<removed>", "epochs": 3}'),
        ("train.py --token abc --epochs 3", "train.py --token <removed> --epochs 3"),
        ("['--token', 'abc', '--epochs', '3']", "['--token', '<removed>', '--epochs', '3']"),
        ("redis://u:p@h1:1,redis://u:p/w@h2:2/1", "redis://<removed>@h1:1,redis://<removed>@h2:2/1"),
        ("https://user:12/ab@host:5432/db?x=1", "https://user:12/ab@host:5432/db?x=1"),  # looks like a port
        ("--token --epochs 3", "--token --epochs 3"),
        ("cache_key=1a2b3c4d5e", "cache_key=<removed>"),
    ],
)
def test_what_surrounds_a_secret_is_kept(text, expected):
    assert cleaner().hide(text) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [("WANDB_API_KEY", True), ("SSHPASS", True), ("MYSQL_PWD", True), ("KEY", True), ("GITHUB_PAT_TOKEN", True)]
    + [("TFDS_DATA_DIR", False), ("KERAS_BACKEND", False), ("monkey", False), ("keyboard", False), ("compass", False)]
    + [("collective-keys", False), ("api_keys", True), ("max_tokens", False), ("hfToken", True), ("pad_token", False)],
)
def test_names(name, expected):
    assert is_secret(name) == expected
