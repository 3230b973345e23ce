"""Requests: their tokens, their keys, and the bytes that their KV has to have."""

from jaxkv import Extras, KeyChain, MultimodalItem, Namespace, Retention
from tests.campaign import truth

ALPHABET = 3

PLAIN = Extras()
EXTRAS = (
    Extras(cache_salt="a"),
    Extras(cache_salt=""),
    Extras(lora_name="a"),
    Extras(cache_salt="a", lora_name="a"),
    Extras(multimodal=(MultimodalItem(b"image", 2),)),
    Extras(multimodal=(MultimodalItem(b"other", 2), MultimodalItem(b"image", 9))),
)
RETENTIONS = (
    None,
    Retention(priority=99, ttl_s=0.3),
    Retention(priority=40, half_life_s=0.05),
    Retention(ttl_s=60, num_tokens=10),
)


class User:
    """A request, with the attributes that the scheduler reads."""

    def __init__(self, request_id, groups, tokens, extras, max_tokens, weights, epoch):
        self.request_id = request_id
        self.tokens = []
        self.extras = extras
        self.max_tokens = max_tokens
        self.num_prompt_tokens = len(tokens)
        self.retention = RETENTIONS[len(tokens) % len(RETENTIONS)]
        # Often no other engine computes the prompt: the wait times out.
        self.remote_prefill = not len(tokens) % 7
        self.num_computed_tokens = 0
        self.phase = "waiting"
        self.is_rewritten = False
        self.has_offer = False
        self.digests = [truth.start(weights, extras)]
        self._namespaces = [
            Namespace("campaign", epoch, "bytes", "rows", spec.block_size)
            for spec in groups
        ]
        self._chains = self._new_chains()
        self._num_groups = len(groups)
        self.lose_blocks()
        for token in tokens:
            self.append(token)

    @property
    def num_tokens(self):
        return len(self.tokens)

    @property
    def block_keys(self):
        return self._chains[0].keys

    @property
    def block_keys_by_group(self):
        return [chain.keys for chain in self._chains]

    @property
    def table(self):
        return self.tables if self._num_groups > 1 else self.tables[0]

    def append(self, token):
        items = [i for i in self.extras.multimodal if i.offset == len(self.tokens)]
        self.tokens.append(token)
        self.digests.append(truth.extend(self.digests[-1], token, items))
        for chain in self._chains:
            chain.extend([token])

    def rewrite(self, num_kept, tokens):
        """Replace the tokens after the first `num_kept`, as a session does."""
        self.is_rewritten = True
        kept = self.tokens[:num_kept]
        self.tokens, self.digests = [], self.digests[:1]
        self._chains = self._new_chains()
        for token in (*kept, *tokens):
            self.append(token)
        self.num_prompt_tokens = len(self.tokens)

    def _new_chains(self):
        return [
            KeyChain(namespace, self.extras, group=group)
            for group, namespace in enumerate(self._namespaces)
        ]

    def lose_blocks(self):
        self.tables = [[] for _ in range(self._num_groups)]
        self.after = None
        self.num_loading = 0
        self.num_computed_tokens = 0
        self.num_cached = [0] * self._num_groups
        self.new_blocks = [[] for _ in range(self._num_groups)]


def random_prompt(rng, stories, max_tokens):
    """Choose a prompt that begins like an earlier one, or not."""
    tokens, extras = [], PLAIN
    if stories and rng.random() < 0.8:
        old, extras = rng.choice(stories)
        max_shared = len(old) if rng.random() < 0.5 else rng.randint(1, len(old))
        tokens = list(old[: min(max_shared, max_tokens * 3 // 4)])
    if rng.random() < 0.15:  # The same tokens of another tenant or adapter.
        extras = rng.choice((PLAIN, *EXTRAS))
    tokens += [rng.randrange(ALPHABET) for _ in range(rng.randint(1, 8))]
    return tokens[: max_tokens - 1], extras
