"""A plain-Python twin of the policy `hazard`, for the twin of the manager.

Written from the description of the policy, with dicts, one key at a time. Only floats
are NumPy's, as Python has none of 32 bits. The tests compare its decisions with the
arrays' decisions, so it follows their rules for collisions within one batch.
"""

import numpy as np

from jaxkv.keys import key_from_foreign

NUM_BINS = 28
STOPS = (None, "tool_use", "end_turn")
TURN_BUCKET = (0, 0, 1, 2, 2, 3)
# A class is a tuple of facts, each of which splits the class without it: those of the
# request, whether the block was known, the conversation's pause, and the request's kind
# if it has one. The request's are (stop, output, bucket of turns, share), or (bucket,
# share) when it begins.
ALL = ()
NEW, KNOWN = 1, 2
# Where bins begin, in units of 512 ms, and how long they are.
STARTS = [0, *[part << octave for octave in range(14) for part in (2, 3)][:27]]
WIDTHS = [2, *[1 << (i // 2) for i in range(NUM_BINS - 1)]]


def bin_of(age_ms):
    """The bin of an age, and the part of it that has gone by, in 1/256."""
    units = age_ms / 512
    number = max(i for i, start in enumerate(STARTS) if start <= units)
    if number == NUM_BINS - 1:
        return number, 0
    return number, int((units - STARTS[number]) / WIDTHS[number] * 256)


def sum_of(nums):
    """The sum in order; Python's and NumPy's own sums are rounded otherwise."""
    return float(np.cumsum(nums)[-1])


def bits_of(number):
    return int(np.float32(number).view(np.int32))


def code_of(of_class):
    """The code of a class of a block whose request has finished."""
    (stop, output, bucket, share), known, pause, *kind = of_class
    number = ((stop * 5 + output) * 4 + bucket) * 4 + share
    return number + 1 << 15 | pause + 1 << 11 | known << 9 | sum(k + 1 for k in kind)


def tag_of(key):
    """The tag of a key in the directory: a hash of 32 bits."""
    words = np.frombuffer(key if len(key) == 32 else key_from_foreign(key), "<u4")
    factor, hashes = 1, []
    for _ in range(2):
        total = 0
        for word in words.tolist():
            factor = factor * 0x9E3779B1 % 2**32
            total += word * factor
        bits = total % 2**32
        bits = (bits ^ bits >> 16) * 0x85EBCA6B % 2**32
        bits = (bits ^ bits >> 13) * 0xC2B2AE35 % 2**32
        hashes.append(bits ^ bits >> 16)
    first, second = hashes
    return max(first ^ (second >> 7) * 0x2545F491 % 2**32, 1)


class Known:
    """A key's note: the class and turn of the request that used it last."""

    def __init__(self, of_class, turn, has_child, last_ms):
        self.of_class = of_class
        self.turn = turn
        self.has_child = has_child
        self.last_ms = last_ms
        self.depth = 0
        self.parent = None  # a block id


class ReferenceHazard:
    def __init__(self, num_blocks, num_ghosts=1 << 16, by_flops=False):
        self.num_blocks = num_blocks
        self.by_flops = by_flops
        self.block_tokens = 1 << 20
        self.num_sets = num_ghosts // 4
        self.blocks = {}  # key -> Block
        self.notes = {}  # key -> Known, of keys with a block
        self.ghosts = {}  # (set, way) -> [tag, Known]
        self.times = {}  # (set, way) -> the last time that was written there
        self.classes = [ALL]  # in the order in which they were first seen
        self.begins = {}  # class -> the class by what is known at the beginning
        self.touches = {ALL: 0.0}
        self.reuses = {ALL: np.zeros(NUM_BINS)}
        self.index = {}
        self.queue = []
        self.now_ms = None
        self.clock_ms = 0
        self.num_begun = 0
        self.current = (ALL, 1)  # class and turn of the request that began last
        self.rebuild()

    def get(self, key):
        return self.blocks.get(key)

    def snapshot(self):
        return {
            "order": self.in_order(list(self.blocks)),
            "now_ms": self.clock_ms,
            "ghosts": len(self.ghosts),
            "touches": {code_of(c): num for c, num in self.touches.items() if num},
        }

    # --- notifications ---

    def tell_time(self, now_ms):
        if self.now_ms is None or (now_ms - self.clock_ms) % 2**32 < 2**31:
            self.clock_ms = now_ms % 2**32
        self.now_ms = self.clock_ms

    def age(self, note):
        return (self.clock_ms - note.last_ms) % 2**32

    def begin(self, keys, num_tokens, now_ms, positions, kind=None):
        self.tell_time(now_ms)
        self.num_begun += 1
        if self.num_begun % 64 == 0:
            self.decay()
            self.rebuild()
        size = max(num_tokens // (max(positions) + 1), 1)
        self.block_tokens = min(self.block_tokens, size)
        slots = [None if key in self.notes else self.find_slot(key) for key in keys]
        notes = [
            self.notes.get(key) or (self.ghosts[slot][1] if slot else None)
            for key, slot in zip(keys, slots, strict=True)
        ]
        deepest = None
        for row, note in enumerate(notes):
            if note is None or (row and positions[row] == 0):
                break
            deepest = note
        turn, pause = 1, 0
        if deepest is not None:
            seconds = self.age(deepest) // 1000 + 1
            pause = 1 + min(seconds.bit_length() - 1, 11) // 2
            if not deepest.has_child:
                turn = min(deepest.turn + 1, 5)
        for note in notes:
            if note is not None:
                self.reuses[note.of_class][bin_of(self.age(note))[0]] += 1
        share = min(4 * notes.count(None) // len(keys), 3)
        bucket = TURN_BUCKET[turn]
        rest = [pause] if kind is None else [pause, kind]
        classes = [
            self.find_class((bucket, share), NEW if note is None else KNOWN, *rest)
            for note in notes
        ]
        self.current = self.find_class((bucket, share), NEW, *rest), turn
        chosen = [None if key in self.notes else self.choose_slot(key) for key in keys]
        self.note(keys, positions, notes, chosen, classes, turn)
        kind_bits = 0 if kind is None else kind + 1
        return pause | share << 3 | bucket << 5 | turn << 7 | kind_bits << 10

    def finish(self, keys, mark, now_ms, num_output_tokens, stop, positions):
        self.tell_time(now_ms)
        output = 0
        if num_output_tokens is not None:
            output = 1 + sum(num_output_tokens >= step for step in (64, 256, 1024))
        pause, share, bucket = mark & 7, mark >> 3 & 3, mark >> 5 & 3
        rest = [pause, (mark >> 10) - 1] if mark >> 10 else [pause]
        slots = [None if key in self.notes else self.find_slot(key) for key in keys]
        notes = [
            self.notes.get(key) or (self.ghosts[slot][1] if slot else None)
            for key, slot in zip(keys, slots, strict=True)
        ]
        classes = []
        for note in notes:
            known = NEW if note is None or note.of_class == ALL else note.of_class[1]
            begin = self.find_class((bucket, share), known, *rest)
            request = STOPS.index(stop), output, bucket, share
            of_class = self.find_class(request, known, *rest)
            for size in range(3, len(of_class) + 1):
                self.begins.setdefault(of_class[:size], begin[:size])
            self.touches[of_class] += 1
            classes.append(of_class)
        for key in set(keys) & set(self.notes):
            rows = [row for row, k in enumerate(keys) if k == key]
            self.notes[key].depth = max(positions[row] for row in rows)
            before = [keys[row - 1] for row in rows if row and positions[row]]
            parents = [self.blocks[k].block_id for k in before if k in self.blocks]
            self.notes[key].parent = max(parents, default=None)
        chosen = [None if key in self.notes else self.choose_slot(key) for key in keys]
        self.note(keys, positions, notes, chosen, classes, mark >> 7 & 7)

    def find_class(self, *facts):
        """Add a class and those that it is part of, unless they are there."""
        for num in range(1, len(facts) + 1):
            part = facts[:num]
            if part not in self.touches:
                self.classes.append(part)
                self.touches[part], self.reuses[part] = 0.0, np.zeros(NUM_BINS)
                self.index[part] = self.index[part[:-1]]
        return facts

    def note(self, keys, positions, notes, slots, classes, turn):
        """Set the classes of a request's blocks on its keys."""
        followed = [
            row + 1 < len(keys) and positions[row + 1] > 0 for row in range(len(keys))
        ]
        children = [
            is_followed or (note is not None and note.has_child)
            for is_followed, note in zip(followed, notes, strict=True)
        ]
        ghosts = []
        for row, key in enumerate(keys):
            block_note = self.notes.get(key)
            if block_note is not None:
                block_note.of_class, block_note.turn = classes[row], turn
                block_note.last_ms = self.clock_ms
                block_note.has_child = any(
                    child for k, child in zip(keys, children, strict=True) if k == key
                )
            elif slots[row] is not None:
                ghost = Known(classes[row], turn, children[row], self.clock_ms)
                ghosts.append((slots[row], tag_of(key), ghost))
        self.queue = [key for key in self.queue if key not in keys]
        self.write_ghosts(ghosts)

    # --- ghosts: four to a set; the oldest makes room ---

    def find_slot(self, key):
        tag = tag_of(key)
        for way in range(4):
            slot = tag % self.num_sets, way
            if slot in self.ghosts and self.ghosts[slot][0] >> 15 == tag >> 15:
                return slot
        return None

    def choose_slot(self, key):
        slot = self.find_slot(key)
        if slot is not None:
            return slot
        slots = [(tag_of(key) % self.num_sets, way) for way in range(4)]
        ages = [
            (self.clock_ms - self.times[slot]) % 2**32
            if slot in self.ghosts
            else 2**32 - 1
            for slot in slots
        ]
        return slots[ages.index(max(ages))]

    def write_ghosts(self, ghosts):
        """Write all ghosts; of several for one slot, the highest word stays."""
        for slot in {slot for slot, _, _ in ghosts}:
            of_slot = [ghost for ghost in ghosts if ghost[0] == slot]
            _, tag, note = max(of_slot, key=lambda g: (g[1] >> 15, *self.word(g[2])))
            note.last_ms = max(ghost.last_ms for _, _, ghost in of_slot)
            self.ghosts[slot] = [tag, note]
            self.times[slot] = note.last_ms

    def word(self, note):
        return note.has_child, note.turn, self.classes.index(note.of_class)

    # --- what is learned ---

    def decay(self):
        for of_class in self.reuses:
            self.touches[of_class] -= self.touches[of_class] / 256
            self.reuses[of_class] -= self.reuses[of_class] / 256

    def rebuild(self):
        touches, reuses, shares = dict(self.touches), dict(self.reuses), {}
        begins = list(self.begins.items())
        parents = [(c, c[:-1]) for c in reversed(self.classes[1:])]
        for of_class, whole in begins + parents:
            if whole != ALL or len(of_class[0]) == 4:  # Else it counts twice.
                touches[whole] += touches[of_class]
                reuses[whole] = reuses[whole] + reuses[of_class]
        for of_class in sorted(self.classes, key=lambda of_class: len(of_class) == 4):
            num, nums = touches[of_class], reuses[of_class]
            if of_class == ALL:
                shares[ALL] = (nums + 32) / (num + 64 * NUM_BINS)
            else:
                above = shares[of_class[:-1]]
                if len(of_class) == 4:
                    above = above / self.divisor(of_class, sum_of(above), shares)
                shares[of_class] = (nums + 1024 * above) / (num + 1024)
            self.index[of_class] = self.make_row(shares[of_class].tolist())

    def divisor(self, with_kind, chance, shares):
        """Return what divides the shares without the kind, from all its classes."""
        num = num_used = expected = 0.0
        for of_class in self.classes:
            if of_class[1::2] == with_kind[1::2] and len(of_class[0]) == 4:
                num += self.touches[of_class]
                num_used += sum_of(self.reuses[of_class])
                expected += self.touches[of_class] / (1 / sum_of(shares[of_class[:-1]]))
        if num == 0:
            return 1.0
        usual = min(expected / num, 1 - 2**-10)
        odds = (num_used + 256 * usual) / (max(num - num_used, 0) + 256 * (1 - usual))
        odds /= usual / (1 - usual)
        chance = min(chance, 1.0)
        return (1 - chance) / odds + chance if odds != 1 else 1.0

    @staticmethod
    def make_row(shares):
        left, held = 1.0, []
        for share, width in zip(shares, WIDTHS, strict=True):
            held.append(max(left - share / 2, share / 2 + 2**-20) * width)
            left -= share
        row = []
        for start in range(NUM_BINS):
            best, num, time = 0.0, 0.0, 0.0
            for stop in range(start, NUM_BINS):
                num += shares[stop]
                time += held[stop]
                best = max(best, num / time)
            row.append(bits_of(best))
        return [*row, row[-1]]

    def value(self, note):
        """Return what a block is worth now by its class, without later blocks."""
        number, part = bin_of(self.age(note))
        low, high = self.index[note.of_class][number : number + 2]
        return low + (high - low >> 8) * part

    def values(self):
        """Return each block's value, which is at least the value of its successors."""
        values = {}
        for key, note in self.notes.items():
            values[key] = self.value(note)
            if self.by_flops:  # times 1 + tokens before it / 30,000, as logarithms
                tokens = note.depth * self.block_tokens
                values[key] += bits_of(30_000 + tokens) - bits_of(30_000)
        by_id = {block.block_id: key for key, block in self.blocks.items()}
        for key in sorted(values, key=lambda key: -self.notes[key].depth):
            parent = by_id.get(self.notes[key].parent)
            if parent and self.notes[parent].depth == self.notes[key].depth - 1:
                values[parent] = max(values[parent], values[key])
        return values

    def in_order(self, keys):
        values = self.values()
        return sorted(
            keys,
            key=lambda k: (values[k], -self.notes[k].depth, self.blocks[k].block_id),
        )

    # --- what every policy does ---

    def touch(self, keys):
        if self.now_ms is None and keys:
            self.clock_ms += 1024
        for key in keys:
            if key in self.notes:
                self.notes[key].last_ms = self.clock_ms
        self.queue = [key for key in self.queue if key not in keys]

    def insert_all(self, keys, new):
        slots = {key: self.find_slot(key) for key in new}
        for key, block in new.items():
            slot, (of_class, turn) = slots[key], self.current
            ghost = self.ghosts[slot][1] if slot else Known(of_class, turn, False, 0)
            is_told = slot is not None and self.now_ms is not None
            last_ms = ghost.last_ms if is_told else self.clock_ms
            note = Known(ghost.of_class, ghost.turn, ghost.has_child, last_ms)
            row = note.depth = keys.index(key)
            # Only if it comes in the same batch, and not twice.
            if row and keys[row - 1] in new and keys.index(keys[row - 1]) == row - 1:
                note.parent = new[keys[row - 1]].block_id
            self.blocks[key], self.notes[key] = block, note
        for slot in slots.values():
            if slot is not None:
                self.ghosts.pop(slot, None)

    def remove(self, key):
        del self.blocks[key], self.notes[key]
        self.queue = [k for k in self.queue if k != key]

    def idle(self, keys, protected):
        return [k for k in keys if self.blocks[k].ref_cnt == 0 and k not in protected]

    def refill(self, num, protected):
        idle = self.idle(self.blocks, protected)
        if len(idle) < num:
            return False
        self.queue = self.in_order(idle)[: num + -(-self.num_blocks // 16)]
        return True

    def admit(self, missing, num_free, protected):
        """Return the first keys that are worth more than what they would evict."""
        if self.now_ms is None:
            return missing
        worth, highest = {}, -1
        for key in reversed(missing):
            slot = self.find_slot(key)
            note = Known(self.current[0], 1, False, self.clock_ms)
            note = self.ghosts[slot][1] if slot else note
            worth[key] = highest = max(highest, self.value(note))
        num_short = len(missing) - num_free
        for is_fresh in (False, True):
            victims = self.idle(self.queue, protected)
            for num, key in enumerate(missing[num_free:]):
                if num == len(victims):
                    break
                if worth[key] <= self.value(self.notes[victims[num]]):
                    return missing[: num_free + num]
            else:
                return missing
            if is_fresh or not self.refill(num_short, protected):
                return missing

    def evict(self, num, protected):
        usable = self.idle(self.queue, protected)[:num]
        if len(usable) < num:
            if not self.refill(num, protected):
                return None
            usable = self.queue[:num]
        if num:
            # What was passed over is not looked at again until the next time.
            self.queue = self.queue[self.queue.index(usable[-1]) + 1 :]
        ghosts = [
            (self.choose_slot(key), tag_of(key), self.notes[key]) for key in usable
        ]
        victims = [(key, self.blocks[key]) for key in usable]
        for key in usable:
            del self.blocks[key], self.notes[key]
        self.write_ghosts(ghosts)
        return victims
