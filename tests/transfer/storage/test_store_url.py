"""Text that is nearly a store's URL is refused, and shows no secret."""

import itertools
import pickle
import random
import re
import unicodedata
from urllib.parse import quote, unquote

import pytest

from jaxkv.transfer.storage import open_store, store_url
from jaxkv.transfer.storage.store_url import StoreUrl, shown_url

SECRET = "hunter2"
PASSWORDS = [SECRET, f"pa/{SECRET}", f"pa?{SECRET}", f"pa#{SECRET}", f"pa@{SECRET}"]
PASSWORDS += [f"pa:{SECRET}", f"12/{SECRET}", f"%2F{SECRET}", f"{SECRET}/x"]
SCHEMES = ["redis", "rediss", "redis+cluster", "valkey", "s3", "gs", "https"]
SCHEMES += ["unix", "postgres"]


# A text, and what the message about it has.
NEARLY = [
    ("", "must be a URL or the path of a folder"),
    (3000 * "x", "must be a URL or the path of a folder"),
    ("redis://host\n", "cannot be printed, nor spaces"),
    (" redis://host", "cannot be printed, nor spaces"),
    # What would be a folder of this name, beside the process.
    ("localhost:6379", "redis://localhost:6379"),
    ("redis.prod.svc:6379/0", "redis://redis.prod.svc:6379/0"),
    ("me@host", "the scheme of a URL, such as redis://HOST:PORT"),
    ("//host/kv", "with ./ to be a folder"),
    ("C:\\kv", "with ./ to be a folder"),
    ("C:/kv", "with ./ to be a folder"),
    ("redis//host:6379", "must begin with redis://"),
    ("redis:/host", "must begin with redis://"),
    ("Redis:host", "must begin with redis:// to be a URL, or with ./ to be a folder"),
    ("file:kv", "must begin with file:///"),
    ("S3:/bucket/kv", "must begin with s3://"),
    ("~/kv", "storage='~/kv' must be the path itself: ~ and variables"),
    ("$HOME/kv", "must be the path itself"),
    ('"redis://host:6379/0"', "did you mean 'redis://host:6379/0'"),
    ("'/var/kv'", "did you mean '/var/kv'"),
    ("JAXKV_STORAGE=redis://host", "did you mean 'redis://host'"),
    ("JAXKV_STORAGE=/var/kv", "did you mean '/var/kv'"),
    ('--storage="s3://bucket/kv"', "did you mean 's3://bucket/kv'"),
    # Schemes.
    ("nope://x", "unknown 'nope': choose from file, s3, gs"),
    ("redi://x", "did you mean redis"),
    ("valkey://host", "did you mean redis?"),
    ("s3a://bucket/kv", "did you mean s3?"),
    ("gcs://bucket/kv", "did you mean gs?"),
    ("https://bucket.s3.amazonaws.com/kv", "is s3://BUCKET/PREFIX?endpoint=https"),
    # Folders.
    ("file:///file:///kv", "must be file:///PATH"),
    ("file://host/kv", "must be file:///PATH"),
    ("file:///kv?what=1", "must be file:///PATH"),
    ("file:///kv#1", "and %23 for # in a name"),
    ("file:///kv%00", "storage='file:///kv...' must have a path that can be"),
    ("file:///kv%FF", "storage='file:///kv...' must have a path that can be"),
    ("file:///kv?mode=777", "must be permissions of files such as 600"),
    ("/var/kv?mode=660", "file:///PATH?mode=660"),
    ("file:///var/kv&mode=660", "must be file:///PATH, with ?mode=660"),
    # Buckets.
    ("s3://", "must be s3://BUCKET/PREFIX with ?endpoint= and ?region="),
    ("s3://kv/model", "the bucket of at least 3 letters"),
    ("s3://[bucket", "storage='s3://...' cannot be read"),
    ("s3://bucket/kv?endpint=x", "with ?endpoint= and ?region="),
    ("s3://bucket/kv?endpoint=", "with ?endpoint= and ?region="),
    ("s3://bucket/kv?endpoint=minio:9000", "endpoint= must be http://HOST:PORT"),
    ("s3://bucket/kv&region=eu", "with ?endpoint= and ?region="),
    ("gs://b?endpoint=x", "must be gs://BUCKET/PREFIX"),
    # Redis.
    ("redis://redis://host", "must be redis://HOST:PORT/DB"),
    ("redis://:6379", "must be redis://HOST:PORT/DB"),
    ("redis://host:port", "must be redis://HOST:PORT/DB"),
    ("redis://host:99999", "must be redis://HOST:PORT/DB"),
    ("redis://host/kv", "storage='redis://host/...' must be redis://HOST"),
    ("redis://host#0", "must be redis://HOST:PORT/DB"),
    ("redis://a:1,b:2", "must be redis://HOST:PORT/DB"),
    ("redis://:pa/word@host", "write / ? # @ & ; in a password as %2F"),
    ("redis://host/0?socket_timout=1", "did you mean socket_timeout?"),
    ("rediss://host?ssl_cert_reqs=x", "storage='rediss://host': Invalid SSL"),
    ("redis+cluster://host/1", "must be redis+cluster://HOST:PORT, or several nodes"),
    ("redis+cluster://a,,b:1", "must be redis+cluster://HOST:PORT"),
    ("redis+cluster://a,b:port", "storage='redis+cluster://...' must be redis"),
    ("unix://", "must be unix:///PATH"),
    ("unix://run/redis.sock", "must be unix:///PATH"),
    ("unix://me:of\u2100others@host/x", "storage='unix://...' cannot be read"),
]


def test_text_that_is_nearly_a_url_is_refused_with_the_likely_form(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for text, likely in NEARLY:
        with pytest.raises(ValueError, match=r"^storage=") as info:
            open_store(text)
        assert likely in str(info.value)
        assert "\n" not in str(info.value)
    assert not list(tmp_path.iterdir())


def test_a_path_is_a_folder_as_it_is_and_a_scheme_counts_in_any_case():
    for path in ("kv", "./kv", "../kv", "kv/model", "kv/llama:8b", "/kv/a@b", "./a:1"):
        url = StoreUrl.parse(path)
        assert (url.scheme, url.path, url.shown) == ("file", path, path)
    assert StoreUrl.parse("REDIS://Host:1/0").text == "redis://Host:1/0"
    assert StoreUrl.parse("File:///kv?mode=660").mode == 0o660


# URLs with a secret that users write, rightly or not.
BASES = [
    f"{scheme}://{user}:{password}@{place}"
    for scheme, password, (user, place) in itertools.product(
        SCHEMES, PASSWORDS, (("", "host:6379/0"), ("me", "bucket/p"), ("12", "a:1,b"))
    )
]
BASES += [
    base.format(SECRET)
    for base in (
        "s3://bucket/model?access_key=AKIA&secret_key={}",
        "s3://bucket/model&secret_key={}",
        "s3://bucket/kv?{}",
        "s3://bucket?endpoint=http://h:9000/?secret={}&region2=x",
        "s3://bucket?endpoint=http://me:{}@h:9000",
        "s3://AKIA:12/{}@bucket/kv",
        "gs://bucket/model?token={}",
        "gs://bucket#{}",
        "mooncake://host:50051?password={}",
        "mooncake://host?metadata=http://m/?token={}",
        "redis://host?password={}",
        "rediss://h:1/0?ssl_password={}",
        "rediss://h:1/0?client_name=x&ssl_password={}&db=x",
        "unix:///r.sock?password={}",
        "unix://me:{}@/r.sock?db=0",
        "file:///kv?mode=660&password={}",
        "redis://me:{}",
        "redis:/:{}@host",
        "redis::{}@host",
        "redis//:{}@host",
        ":{}@host:6379",
        "http://user:pa/{}@minio:9000/kv",
        "{}?x@host",
    )
]
LOOK_ALIKES = {"?": "\uff1f", "&": "\uff06", ";": "\uff1b", "=": "\uff1d"}
LOOK_ALIKES |= {"@": "\uff20", ":": "\uff1a", "/": "\uff0f", "#": "\uff03"}


def mutant(rng, text):
    """Change a URL outside of its secret, as typos and encoders do."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at = rng.randrange(len(text))
        start = text.find(SECRET)
        if start <= at < start + len(SECRET):
            continue
        letter = text[at]
        code = "".join(f"%{byte:02x}" for byte in letter.encode())
        marks = "?#&;=@%"
        new = rng.choice(
            (
                *(rng.choice("\"' :/?#=&%~$.,;\\|"), rng.choice("?&;#="), "", ""),
                *(letter + rng.choice("\n\t\x1b\u2028 :/?#&;@"), letter.swapcase()),
                *(code, code.upper(), code.replace("%", "%25"), "%2525" + code[1:]),
                *(LOOK_ALIKES.get(letter, letter), quote(LOOK_ALIKES.get(letter, ""))),
            )
        )
        if letter in marks and rng.random() < 0.5:
            new = rng.choice(("&", ";", "%3F", "%26", "%3b", "%253F", "&amp;", "?"))
        text = text[:at] + new + text[at + 1 :]
    return rng.choice(("", "", "", '"', "STORAGE=", "--storage ")) + text


def decoded(text):
    for _ in range(9):
        text = unquote(text)
    return unicodedata.normalize("NFKC", text)


def is_telling(text):
    """Whether a text differs from a host or a path that is named as the secret."""
    before, _, after = decoded(text).partition(SECRET)
    place = before.partition("://")[2] if "://" in before else before
    if "@" not in after:
        place = place.rpartition("@")[2]  # It seems to be a host.
    if text.startswith(("/", "./", "../")) or "://" not in before:
        return re.search(r"[?&;]\s*\w+\s*=", place) is not None
    return "@" in after or re.search("[?#&;=:%]", place) is not None


def texts_of(text, opens):
    """Everything that is said of a text, with the errors behind a refusal."""
    texts = [shown_url(text)]
    error = None
    try:
        url = opens(text)
        texts += [url, str(url), getattr(url, "shown", "")]
    except (ValueError, ImportError) as caught:
        error = caught
    while error is not None:
        texts += [error, *error.args, pickle.loads(pickle.dumps(error))]
        error = error.__context__
    return repr(texts)


def test_no_mutated_url_shows_its_secret(caplog, monkeypatch):
    # It reads the metadata of every installed package, for each unknown scheme.
    monkeypatch.setattr(store_url, "registered_store", lambda scheme: None)
    rng = random.Random(5)
    num_refused = num_accepted = 0
    for text in BASES:
        assert SECRET not in texts_of(text, StoreUrl.parse), text
    for _ in range(8_000):
        text = mutant(rng, rng.choice(BASES))
        if SECRET not in text or not is_telling(text):
            continue
        texts = texts_of(text, StoreUrl.parse)
        assert SECRET not in decoded(texts), text
        num_refused += "ValueError" in texts
        num_accepted += "ValueError" not in texts
    assert num_refused > 6_000
    assert num_accepted > 30
    assert not caplog.text


def test_a_url_of_another_type_is_shown_to_nobody():
    with pytest.raises(ValueError, match=r"^storage=<bytes> must be a URL or the"):
        open_store(b"redis://:hunter2@host")


def test_messages_of_others_lose_the_password():
    url = StoreUrl.parse("redis://me:hun%2Fter2@host?password=other&db=1")
    message = "unknown command HELLO with 1 `hun/ter2` 'hun%2Fter2' other others"
    assert url.hide(message) == "unknown command HELLO with 1 `...` '...' ... others"
