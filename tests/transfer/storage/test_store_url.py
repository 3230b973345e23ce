"""Text that is nearly a store's URL is refused, and shows no secret."""

import random

import pytest

from jaxkv.transfer.storage import open_store
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
    ("Redis:host", "must begin with redis:// to be a URL; a folder of this"),
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
    ("file:///kv%00", "storage='file:///kv%00' must have a path that can be"),
    ("file:///kv%FF", "storage='file:///kv%FF' must have a path that can be"),
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
    ("redis://host/kv", "storage='redis://host/kv' must be redis://HOST:PORT/DB"),
    ("redis://host#0", "must be redis://HOST:PORT/DB"),
    ("redis://a:1,b:2", "must be redis://HOST:PORT/DB"),
    ("redis://:pa/word@host", "write / ? # @ in a password or path as %2F"),
    ("redis://host/0?no_such_option=1", "no_such_option"),
    ("rediss://host?ssl_cert_reqs=x", "storage='rediss://host': Invalid SSL"),
    ("redis+cluster://host/1", "must be redis+cluster://HOST:PORT, or several nodes"),
    ("redis+cluster://a,,b:1", "must be redis+cluster://HOST:PORT"),
    ("redis+cluster://a,b:port", "storage='redis+cluster://...' must be redis"),
    ("unix://", "must be unix:///PATH"),
    ("unix://run/redis.sock", "must be unix:///PATH"),
    ("unix://me:of\u2100others@host/x", "storage='unix://host/x' cannot be read"),
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


def mutants(rng, url):
    """Yield texts that are nearly a URL, the secret in them as it is."""
    for _ in range(60):
        text = url
        for _ in range(rng.choice((0, 1, 1, 2, 3))):
            at = rng.randrange(len(text))
            if 0 <= at - text.find(SECRET) < len(SECRET):
                continue
            letter = rng.choice("\"' :/?#=&%~$.,;")
            # An @ that is missing makes the password a part of the host's name.
            end = at + (text[at] != "@") * rng.choice((0, 1))
            text = text[:at] + rng.choice((letter, letter, "")) + text[end:]
        yield rng.choice(("", "", '"', "STORAGE=", "--storage ")) + text


def texts_of(text, opens):
    """Everything that is said of a text, with the errors behind a refusal."""
    texts = [shown_url(text)]
    error = None
    try:
        texts.append(opens(text))
    except (ValueError, ImportError) as caught:
        error = caught
    while error is not None:
        texts.append(error)
        error = error.__context__
    return repr(texts)


def test_no_message_shows_a_password_of_a_malformed_url():
    rng = random.Random(5)
    num_refused = 0
    for scheme in SCHEMES:
        for password in PASSWORDS:
            user = rng.choice(("", "me"))
            place = rng.choice(("host:6379/0", "host", "bucket/p", "a:1,b:2"))
            for text in mutants(rng, f"{scheme}://{user}:{password}@{place}"):
                if text.startswith(("/", "./")):
                    continue  # It says that it is a path.
                texts = texts_of(text, StoreUrl.parse)
                assert SECRET not in texts, text
                num_refused += "ValueError" in texts
    assert num_refused > 3000


SECRET_PARTS = [
    "s3://bucket/model?access_key=AKIA&secret_key={}",
    "s3://bucket/model&secret_key={}",
    "s3://bucket/kv?{}",
    "s3://bucket?endpoint=http://h:9000/?secret={}&region2=x",
    "s3://bucket?endpoint=http://me:{}@h:9000",
    "s3://AKIA:12/{}@bucket/kv",
    "gs://bucket/model?token={}",
    "gs://bucket#{}",
    "redis://host?password={}",
    "redis://me:{}",
    "redis:/:{}@host",
    "redis::{}@host",
    "redis//:{}@host",
    ":{}@host:6379",
    "http://user:pa/{}@minio:9000/kv",
    "{}?x@host",
]


def test_a_secret_in_an_option_or_a_path_is_shown_to_nobody():
    for text in SECRET_PARTS:
        text = text.format(SECRET)
        assert SECRET not in texts_of(text, lambda url: open_store(url).url), text


def test_a_url_of_another_type_is_shown_to_nobody():
    with pytest.raises(ValueError, match=r"^storage=<bytes> must be a URL or the"):
        open_store(b"redis://:hunter2@host")


def test_messages_of_others_lose_the_password():
    url = StoreUrl.parse("redis://me:hun%2Fter2@host?password=other&db=1")
    message = "unknown command HELLO with 1 `hun/ter2` 'hun%2Fter2' other others"
    assert url.hide(message) == "unknown command HELLO with 1 `...` '...' ... others"
