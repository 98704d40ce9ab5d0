"""Secrets in every notation are removed, and figures stay readable."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from agents.shared.files.secrets import HIDDEN, hide_secrets
from app.doctor.scrub import scrub, scrub_json

NAMES = (
    *(
        "HF_TOKEN",
        "WANDB_API_KEY",
        "MY_SECRET",
        "DB_PASSWORD",
        "PGPASSWORD",
        "SMTP_PASS",
        "APP_PWD",
    ),
    *("MYSQL_PASSWD", "AWS_SECRET_ACCESS_KEY", "GIT_CREDENTIALS", "RESTIC_PASSPHRASE", "TOKEN"),
    *("hub_token", "api_key", "client_secret", "db_password", "userPass", "apiKey", "accessToken"),
    *("dbPassword", "auth-token", "api-key", "x.y.password", "_authToken", "WANDB_API_KEY_2"),
    *(
        "encryption_key",
        "signing_key",
        "deploy_token",
        "ssh_passphrase",
        "SECRET_KEY",
        "credential",
    ),
)
VALUES = (
    "tulips-in-may-9",
    "0123456789abcdef0123456789abcdef01234567",
    "c0ffee" * 10 + "beef",
    "kJ8sd7FhG5kLq2PzXw9VbN3mRt6YuE1oAa4ScDd0",
    "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    "Tr0ub4dor!x",
)
FORMS = {
    "export": "export {name}={value}\n",
    "export in quotes": "export {name}='{value}'; python train.py",
    "before a command": "{name}={value} python train.py --lr 3",
    "env file": '{name}="{value}"\n',
    "set": "set {name}={value}\r\n",
    "setx": "setx {name} {value}\n",
    "PowerShell": '$env:{name} = "{value}"',
    "Dockerfile": "ENV {name} {value}\n",
    "compose": "  - {name}={value}\n",
    "YAML": "{name}: {value}\n",
    "YAML in quotes": "  {name}: '{value}'\n",
    "YAML block": "{name}: |\n  {value}\n  {value}\nsteps: 5\n",
    "JSON": '{{"{name}": "{value}", "steps": 5}}',
    "compact JSON": '{{"{name}":"{value}"}}',
    "JSON in JSON": '{{"said": "{{\\"{name}\\": \\"{value}\\"}}"}}',
    "TOML": '{name} = "{value}"\n',
    "TOML of several lines": '{name} = """\n{value}\n"""\n',
    "INI": "[hub]\n{name} = {value}\n",
    "colon without space": "{name}:{value}\n",
    "Python": "{name} = '{value}'",
    "typed Python": "{name}: str = '{value}'",
    "keyword": "connect(host='x', {name}='{value}', port=5)",
    "bytes": "connect({name}=b'{value}')",
    "repr": "Settings({name}='{value}', steps=5)",
    "dictionary": "{{'{name}': '{value}', 'steps': 5}}",
    "item": "os.environ['{name}'] = '{value}'",
    "default": "os.environ.setdefault('{name}', '{value}')",
    "pair": "[('{name}', '{value}')]",
    "flag": "rackless --{name} {value} --steps 5",
    "flag with sign": "rackless --{name}={value} --steps 5",
    "argv": "['rackless', '--{name}', '{value}', '--steps']",
    "header": "x-{name}: {value}\r\n",
    "query": "https://x.org/?a=1&{name}={value}&steps=5",
    "first in query": "GET https://x.org/api?{name}={value} 200",
    "XML": "<{name}>{value}</{name}>",
    "attribute": '<login {name}="{value}"/>',
    "Go": '{name} := "{value}"',
    "Ruby": ":{name} => '{value}'",
    "list": "{name} = ['{value}', '{value}']",
    "Kubernetes": "- name: {name}\n  value: {value}\n",
    "Kubernetes in JSON": '{{"name": "{name}", "value": "{value}"}}',
    "log": "2026-11-24 17:23:51 INFO {name}={value}, steps=5",
}
ALONE = (
    "authorization: token {value}",
    "Authorization: Bearer {value}",
    "{{'Authorization': 'Bearer {value}'}}",
    "{{'authorization': 'token {value}', 'steps': 5}}",
    'curl -H "Authorization: Basic {value}" https://x.org',
    "Proxy-Authorization: Basic {value}",
    "Cookie: session={value}; theme=dark",
    "login(token='{value}')",
    "login(token={value})",
    "login('{value}')",
    "https://anna:{url}@x.org/repo.git",
    "redis://:{url}@x.org:6379/0",
    "git clone https://anna:{url}@x.org",
    "curl -u anna:{value} https://x.org",
    "machine x.org login anna password {value}",
    "--token {value}",
    "--password={value}",
)
KNOWN = (
    "hf_aBcDeFgHiJkLmNoPqRsT",
    "ghp_aBcDeFgHiJkLmNoPqRsTuVwXyZ0123456789",
    "github_pat_11AAAAAAA0aBcDeFgHiJkL_mNoPqRsTuVwXyZ",
    "glpat-aBcDeFgHiJkLmNoPqRsT",
    "sk-aBcDeFgHiJkLmNoPqRsTuVwX",
    "sk-ant-api03-aBcDeFgHiJkLmNoPqRsTuVwX",
    "sk_live_aBcDeFgHiJkLmNoPqRsTuVwX",
    "xoxb-123456789012-aBcDeFgHiJkL",
    "AKIAIOSFODNN7EXAMPLE",
    "AIzaSyA-aBcDeFgHiJkLmNoPqRsTuVwXyZ01234",
    "npm_aBcDeFgHiJkLmNoPqRsTuVwXyZ0123456789",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U",
)
KEPT = (
    "sha256 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "--hash=sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    '{"run_id": "20261124-172351-3y4", "attempt": 2, "step": 3900, "loss": 1.25}',
    '{"manifest_sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"}',
    "archive_sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "eos_token: </s>, bos_token='<s>', pad_token_id=0, unk_token=<unk>, eos_token='<|im_end|>'",
    "sequence_tokens: 4096, max_new_tokens=256, tokens_per_s: 1234.5, num_key_value_heads: 8",
    "forward pass: 12.5 ms, backward_pass=31 ms, first pass: 5 s, bypass: rank-0",
    "The host key of alpha is SHA256:uNiVztksCsDhcc0u9e8BgrJXVGDhmN9XTMrhG0/t9Zw.",
    "rackless nodes add alpha --ssh anna@10.0.0.2 --accept-host-key SHA256:uNiVztksCsDh",
    "--key /home/anna/.ssh/id_ed25519 and key: ~/.ssh/id_ed25519",
    "missing keys: model.layers.11.self_attn.k_proj.weight, key 'data.train': is missing",
    "run.yaml, line 3: the key sequence_token is not known. Did you mean sequence_tokens?",
    "at step 3900 of 5000, 17 tokens: 5, monkey: banana, keyboard: us",
    "commit 8e3f6780c0ffee00c0ffee00c0ffee00c0ffee00 of main",
    "GPU-5f1c1a2e-0a4e-7d3c-9b4e-3d1f2a5b6c7d at 65 C, 300 W",
    "PWD=/home/anna/work OLDPWD=/home/anna",
    "the tokenizer sha256 is 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "cache key 9f86d081884c7d659a2feaa0c55ad015 of the data",
    "http://127.0.0.1:8000/v1, [fe80::1]:22, node@10.0.0.2:22",
    "torch==2.13.0+cpu, cu130, 2026-11-24 17:23:51, key: 5, tokens=128, secret: none",
    "password is needed for sudo on alpha",
    "no token is stored; type: rackless hub login",
    '{"has_password": false, "needs_token": true, "hub_token": null}',
    "https://huggingface.co/Qwen/Qwen3-0.6B/resolve/main/tokenizer.json?download=true",
)


def matrix() -> Iterator[tuple[str, str, str]]:
    """Yield what was written, its secret, and the form."""
    for form, text in FORMS.items():
        for name in NAMES:
            for value in VALUES:
                yield text.format(name=name, value=value), value, f"{form} {name}"
    for text in ALONE:
        for value in VALUES:
            url = value.replace("/", "%2F")
            yield text.format(value=value, url=url), url if "{url}" in text else value, text
    for text in ("{value}", "token {value}!", "'{value}'", '{{"x": "{value}"}}', "a={value},b"):
        for value in KNOWN:
            yield text.format(value=value), value, text


def test_a_secret_is_hidden_in_every_notation() -> None:
    shown = {form: text for text, secret, form in matrix() if secret in hide_secrets(text, {})}
    assert shown == {}


def test_a_secret_in_json_is_hidden_when_values_are_cleaned_one_by_one() -> None:
    leaks = []
    for name in NAMES:
        for value in VALUES:
            for document in (
                {name: value},
                {name: [value]},
                {name: {"user": "anna", "value": value}},
                {"env": [{"name": name, "value": value}]},
                {"argv": ["rackless", f"--{name}", value]},
                [name, value],
            ):
                text = json.dumps(scrub_json(document, ()))
                if value in text:
                    leaks.append(document)
    assert leaks == []


@pytest.mark.parametrize("text", KEPT)
def test_figures_hashes_and_public_keys_stay(text: str) -> None:
    assert hide_secrets(text, {}) == text


def test_a_report_stays_readable_line_by_line() -> None:
    for text, secret, form in matrix():
        if "steps" in text:
            cleaned = scrub(text, ())
            assert "steps" in cleaned, (form, cleaned)
            assert HIDDEN in cleaned
            assert secret not in cleaned


def test_keys_of_programs_are_hidden_whole() -> None:
    line = "b3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAAEbm9uZQAAAAAAAAABAAAAMwAAAAtz"
    for text in (
        f"-----BEGIN OPENSSH PRIVATE KEY-----\n{line}\n-----END OPENSSH PRIVATE KEY-----",
        json.dumps(f"-----BEGIN RSA PRIVATE KEY-----\n{line}\n"),
        f"Private-Lines: 2\n{line}\n{line}\nPrivate-MAC: 5\n",
        f"ssh_key: {line}\n",
        f"key_data {line}",
    ):
        assert line[20:] not in hide_secrets(text, {})


def test_a_long_text_of_one_word_takes_no_time() -> None:
    started_s = time.process_time()
    for text in (
        "a" * 200_000,
        "token" * 40_000,
        "token=" * 30_000,
        "key " * 50_000,
        "\\" * 200_000,
    ):
        hide_secrets(text, {})
    for text in ("password:'" * 20_000, "://" * 60_000, "a:" * 100_000, "[" * 200_000):
        hide_secrets(text, {})
    assert time.process_time() - started_s < 20


def test_a_variable_of_this_process_is_hidden_wherever_it_stands() -> None:
    environ = {"X_API_KEY": "tulips-in-may", "SSH_KEY": "/home/anna/id", "PWD": "/home/anna/x"}
    said = hide_secrets("sent tulips-in-may from /home/anna/id in /home/anna/x", environ)
    assert said == f"sent {HIDDEN} from /home/anna/id in /home/anna/x"
