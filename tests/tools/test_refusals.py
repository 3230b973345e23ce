"""Each command's refusals: one line that says why, exit 2, and nothing done."""

import itertools
import json
import re

import pytest

from jaxkv.tools import COMMANDS, command_name, commands
from jaxkv.tools.model_config import NAMED_MODELS
from jaxkv.tools.usage import UsageError

pytestmark = pytest.mark.usefixtures("plain_output")

# A command line after `jaxkv`, and words of the error.
REFUSED = """
dmeo                            | error: unknown command 'dmeo': did you mean demo?
xyz                             | error: unknown command 'xyz': choose from demo, plan
--versoin                       | unknown option '--versoin': did you mean --version?

demo --turn 3                   | unknown option '--turn': did you mean --turns?
demo --jso=x                    | unknown option '--jso': did you mean --json?
demo --zzz                      | unknown option '--zzz': choose from -h, --help, --conv
demo --turns                    | --turns: expected one argument
demo --turns 1.5                | --turns: '1.5' must be a whole number from 1 to
demo --policy lur               | --policy: unknown 'lur': did you mean lru?
demo --mode lazily              | --mode: unknown 'lazily': did you mean lazy?
demo --layers mamba             | --layers: unknown 'mamba': choose from full, window
demo --seed 1234567890          | must be a whole number from 0 to 999999999
demo --host-bytes 5XB           | '5XB' must be a size such as 64MiB, 1GiB or
demo --window-tokens 9          | --window-tokens: it belongs to --layers window or
demo --host-bytes 9             | 9 bytes of host memory cannot hold one KV block
demo --host-bytes 9999TiB       | use fewer --device-blocks or --host-bytes
demo --device-blocks 99999999   | --device-blocks or --host-bytes
demo --device-blocks 9          | at least 111 are needed
demo --document-tokens 5000     | but the model takes 4096
demo --document-tokens 9        | document_tokens=9 must be more than the 105
demo --plot a.png               | --plot: 'a.png' must end in .svg
doctor --plot x.svg             | unknown option '--plot': choose from
demo --plot no/a.svg            | --plot: cannot write 'no/a.svg' (No such file
demo --record no/a              | --record: cannot record to 'no/a' (No such file or
demo --record .                 | --record: cannot record to '.' (Is a directory); name
demo --json .                   | --json: cannot write '.' (Is a directory); name a file
demo -o .                       | --output: cannot write '.' (Is a directory); name a 
doctor -o a --json a            | --json: 'a' is the file of --output too, which would
doctor --format xml             | --format: unknown 'xml': choose from table, json

plan                            | missing TRACE: `jaxkv plan --help` explains it
plan none.jsonl               | TRACE: cannot read 'none.jsonl' (No such file or dir
plan .                        | TRACE: cannot read '.' (Is a directory)
plan synthetic:0              | TRACE: 'synthetic:0' must be synthetic:REQUESTS, such
plan bad.jsonl                | error: bad.jsonl:2: 'ids' is missing
plan SMALL --policy lru,      | --policy: unknown '': choose from lru, arc
plan SMALL --capacity x       | --capacity: 'x' must be a number of blocks, such
plan SMALL --capacity 5,0%    | --capacity: '0%' must be more than 0
plan SMALL --capacity 101%    | '101%' is more than the
plan SMALL --capacity 9999999 | unique blocks of the trace
plan SMALL --max-offload-tokens 511 | 511 is less than a block, which has 512 tokens
plan SMALL --prompt-only      | no output of the trace filled a block that could be
plan SMALL --engines 0         | --engines: '0' must be a whole number from 1 to
plan SMALL --engines 61        | --engines: 61 must be at most 60, the requests of
plan SMALL --engines 2 --route fastest | --route: unknown 'fastest': choose from round
plan SMALL --route sticky      | --route: it belongs to --engines
plan SMALL --storage-blocks 5% | --storage-blocks: it belongs to --engines
plan SMALL --engines 2 --storage-blocks 0% | --storage-blocks: '0%' must be more than
plan SMALL --model llama-3-8b | a known model: did you mean llama-3.1-8b?
plan SMALL --model no.json    | --model: cannot read 'no.json' (No such file
plan SMALL --model empty.json | jaxkv plan takes the bytes of a token's KV in its pl
plan SMALL --html no/a        | --html: cannot write 'no/a' (No such file
plan TOKENS                     | --kv-bytes-per-token: it does not say how long pref
plan TOKENS --mfu 0.3           | --mfu: it belongs to --model
plan TOKENS --tensor-parallel 2 | --tensor-parallel: it belongs to --model
plan TOKENS --kv-dtype int8     | --kv-dtype: it belongs to --model
plan TOKENS000TB --prefill-tokens-per-s 5 | must be from 1 to 1073741824
plan MODEL --kv-dtype fast      | --kv-dtype: 'fast' is no dty
plan MODEL --kv-bytes-per-token 5 | --model says it alrea
plan MODEL --host-bytes 1MiB    | --host-bytes: 1048576 bytes hold no bl
plan MODEL --storage-bytes 1TiB | --storage-bytes: it belongs to --engines
plan MODEL --engines 2 --storage-bytes 1MiB | --storage-bytes: 1048576 bytes hold no
plan MODEL --load-gb-per-s nan  | 'nan' must be a number a
plan MODEL --mfu 1.5            | --mfu: 1.5 must be at most 1
plan MODEL --device-bytes 5     | --device-bytes: 5 bytes hold
plan MODEL --device-bytes 1GiB --device-blocks 5 | --device-blocks says it already
plan MODEL --measure --load-gb-per-s 5 | --measure: the speeds are given already
plan MODEL --prefill-tokens-per-s 5 --mfu 0.5 | --mfu: --prefill-tokens-per-s says it
plan MODEL --policy lur         | unknown 'lur': did you mean lru?
plan long.jsonl --model llama-3.1-8b | 'in' must be a number of tokens from 0 to
plan SMALL --host-bytes 1GiB     | --host-bytes: it belongs to --model, so give that
plan SMALL --measure             | --measure: it belongs to --model, so give that too
plan SMALL --policy optimum      | --policy: optimum is only a bound: name a policy as
plan SMALL --policy lru,optimum --engines 2 | --policy: optimum is for one engine: omi
plan MODEL --host-bytes 1GiB --capacity 5 | --host-bytes: --capacity says it already

doctor --need event             | --need: unknown 'event': did you mean events?
doctor --storage ftp://x        | --storage: 'ftp://x': unknown 'ftp': choose
doctor --storage s3://          | --storage: 's3://...' must be s3://BUCKET/PREFIX
doctor --storage-bytes 1GiB     | --storage-bytes: it belongs to --storage

store                           | name one of these: ls, size, rm
store ls x --yes                | --yes: it belongs to jaxkv store rm
store list .                    | unknown command 'list': did you mean ls?
store ls                        | missing URL of the store: name it, or set JAXKV
store ls memory://x             | URL: 'memory://x' is the memory of another process
store ls nowhere                | URL: there is no folder 'nowhere'
store size s3://                | URL: 's3://...' must be s3://BUCKET/PREFIX
store rm . --yes                | missing --namespace: `jaxkv store ls` prints th
store rm . --namespace a --yes  | 'a' must be a name as `jaxkv store ls` prints it
status                          | missing URL: `jaxkv status --help` explains it
status ftp://x                  | URL: 'ftp://x' must be the address of an engine's
status x:y                      | URL: 'x:y' must be the address of an engine's metrics
status a..b:1                   | URL: 'a..b:1' must be the address of an engine's metr
status x/ä                      | URL: 'x/ä' must be the address of an engine's metrics
status user:secret@x:1          | URL: give it without user and password: they are not
status 1 --every 0              | --every: '0' must be a number of at least 0.1
status 1 --every 1e11           | --every: '1e11' must be a number of at least 0.1

verify --budget 10              | --budget: '10' must be a duration such as 90s or 10m
verify --only block             | --only: unknown 'block': did you mean blocks?
verify --folder=                | --folder: '' must be the path of a folder
verify --resume                 | --resume: cannot use 'jaxkv-verify' (No such file
"""
STANDS_FOR = {
    "SMALL": "synthetic:60",
    "TOKENS": "synthetic:20 --kv-bytes-per-token 1000",
    "MODEL": "synthetic:20 --model llama-3.1-8b",
}


def test_a_refusal_is_one_line_and_nothing_is_done(refused, tmp_path):
    request = '{"t": 0, "in": 512, "out": 1, "ids": [1]}\n'
    (tmp_path / "bad.jsonl").write_text(request + '{"t": 0, "in": 512}\n')
    (tmp_path / "long.jsonl").write_text(request.replace("512", "9007199254740991"))
    (tmp_path / "empty.json").write_text("{}")
    for row in filter(None, REFUSED.splitlines()):
        line, message = map(str.strip, row.split(" | "))
        for name, text in STANDS_FOR.items():
            line = line.replace(name, text)
        err = refused(line)
        assert err.startswith(f"{command_name(line.split())}: error: "), row
        assert message in err, row


def usages():
    """Every command's options, by the words that choose it."""
    for name in COMMANDS:
        for word, command in commands.load_commands(name).items():
            yield f"{name} {word}".rstrip(), command.usage


def test_help_has_at_most_two_lines_for_an_option_and_fits_a_terminal():
    for words, usage in usages():
        assert usage.name == f"jaxkv {words}"
        lines = usage.help.splitlines()
        assert max(map(len, lines)) <= 80
        for option in usage.options.values():
            (first,) = (
                n
                for n, line in enumerate(lines)
                if re.match(rf"  (-\w, )?{option.name}\b(?!-)", line)
            )
            text = itertools.takewhile(lambda li: li[:3] == "   ", lines[first + 1 :])
            is_alone = len(lines[first]) < 26 + len(option.name)
            assert len(list(text)) <= 1 + is_alone, lines[first]
            default = usage.defaults.get(option.field)
            if default and not option.value.startswith("SIZE"):
                assert f"(default: {default})" in option.about, option


def test_every_option_with_a_number_refuses_what_is_none():
    num_refused = 0
    for _, usage in usages():
        for option in usage.options.values():
            if option.value.removesuffix(",...") not in ("N", "X", "SIZE", "PORT"):
                continue
            if option.field in ("capacity", "storage_blocks"):
                continue  # They are checked against the trace.
            for text in ("?", "", "-1", "many"):
                message = f"^{option.name}: '.*' must be "
                with pytest.raises(UsageError, match=message):
                    usage.parse([f"{option.name}={text}"])
            num_refused += 1
    assert num_refused > 30


LLAMA = NAMED_MODELS["llama-3.1-8b"]


def test_a_file_that_describes_no_model_is_refused(refused, tmp_path):
    for text, message in (
        ("{", "is no JSON"),
        ("[" * 10**5, "is no JSON"),
        ("[]", "must hold a JSON object"),
        (
            "{}",
            "has no 'num_hidden_layers', 'hidden_size', 'num_attention_heads', 'voc",
        ),
        ({"model_type": "x" * 10**5, "vocab_size": None}, "xxx'"),
        ({"layer_types": ["\x1b[31m"] * 32}, "of type '\\x1b[31m'"),
    ):
        if isinstance(text, dict):
            text = json.dumps({**LLAMA, **text})
        (tmp_path / "config.json").write_text(text)
        err = refused("plan synthetic:20 --model config.json")
        assert err.startswith("jaxkv plan: error: --model: ")
        assert message in err


def test_a_file_that_is_read_or_written_already(refused, tmp_path):
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"t": 0, "in": 512, "out": 1, "ids": [1]}\n')
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "l").symlink_to(trace)
    (tmp_path / "folder").mkdir()
    for options, what in (
        ("--json t.jsonl", "--json: 't.jsonl' is the file of TRACE too"),
        ("--html l", "--html: 'l' is the file of TRACE too"),
        ("--html folder/../t.jsonl", "'folder/../t.jsonl' is the file of TRACE too"),
        ("--model config.json --json config.json", "is the file of --model too"),
        ("--plot a.svg --html a.svg", "--html: 'a.svg' is the file of --plot too"),
    ):
        err = refused(f"plan t.jsonl {options}")
        assert f"{what}, which would be lost; name another\n" in err
    assert trace.read_text().startswith('{"t": 0')
