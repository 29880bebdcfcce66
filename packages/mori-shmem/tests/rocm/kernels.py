"""Kernels of the tests, made for a module of device helpers: the package's own, or a copy with one line
changed (variants.py). No postponed annotations here: FlyDSL reads them.

Each has a factory `NAME(dev, ...)` that gives launch(args, stream). `args` is the address of a row of 64-bit
words, the same for all kernels, so that they can be started alike:

    base, stride, rank, queues, record, timeout_ticks, out, round        and what ARGS below lists after that
"""

import flydsl.compiler as flyc
import flydsl.expr as fx

NULL = fx.Stream(0)
BASE, STRIDE, RANK, QUEUES, RECORD, TIMEOUT, OUT, ROUND = range(0, 64, 8)
FLAGS, FLAG_STRIDE = 64, 72  # the window of signals
SPARE = 80  # a word of this GPU's own


def launcher(kernel, blocks, threads):
    @flyc.jit
    def launch(args: fx.Int64, stream: fx.Stream = NULL):
        kernel(args).launch(grid=(blocks, 1, 1), block=(threads, 1, 1), stream=stream)

    return launch


class Env:
    """What a kernel is given, loaded once."""

    def __init__(self, dev, args):
        def word(offset):
            return fx.generic_load(dev.pointer(fx.Int64, args + offset, 8))

        self.rank = fx.Int32(word(RANK))
        self.data = dev.window(word(BASE), word(STRIDE), self.rank)
        self.flags = dev.window(word(FLAGS), word(FLAG_STRIDE), self.rank)
        self.queues, self.record, self.out = word(QUEUES), word(RECORD), word(OUT)
        self.round, self.spare = word(ROUND), word(SPARE)
        self.deadline = dev.deadline_after(word(TIMEOUT))


def pattern(sender, receiver, round_, place):
    """One dword that says where it comes from. All Int32 (tests know it as pattern_of)."""
    return ((sender * 8 + receiver) * 64 + round_) * 4096 + place


def store_pattern(dev, store, address, sender, receiver, round_, lane, place):
    """16 bytes a lane: 1 KiB a wave."""
    first = place * 256 + lane * 4
    words = [pattern(sender, receiver, fx.Int32(round_), first + i) for i in range(4)]
    store(address + fx.Int64(lane) * 16, fx.Vector.from_elements(words, fx.Int32))


# The data window: outgoing rows by receiver, incoming rows by sender, SLOT bytes each; then what was found.
SLOT = 16 * 1024
KIB = 1024


def outgoing(receiver, world):
    return fx.Int64(receiver) * SLOT


def incoming(sender, world):
    return fx.Int64(sender + world) * SLOT


def copy_out(dev, env, load, sender, lane, place, nbytes_at):
    """What has come in, as this wave loads it, to `out`."""
    source = dev.my_address(env.data, nbytes_at) + fx.Int64(place) * KIB + fx.Int64(lane) * 16
    there = env.out + fx.Int64(sender) * SLOT + fx.Int64(place) * KIB + fx.Int64(lane) * 16
    dev.store16(there, load(source))


def puts(dev, world, waves, per_wave, through):
    """Blocks 0..world-1: each wave makes its share of the row for rank `block` and puts it, a KiB at a time,
    through one queue for all of them. Blocks world..2*world-1: wait for all of a sender's, then read."""
    count = waves * per_wave

    @flyc.kernel
    def puts_kernel(args: fx.Int64):
        env = Env(dev, args)
        wave, lane = fx.thread_idx.x // 64, fx.thread_idx.x % 64
        if fx.block_idx.x < world:
            peer = fx.block_idx.x
            queue = dev.open_queue(dev.queue_address(env.queues, fx.Int64(peer)))
            flag = dev.peer_address(env.flags, peer, 0) + fx.Int64(env.rank) * 8
            mine = dev.my_address(env.data, outgoing(peer, world))
            there = dev.peer_address(env.data, peer, incoming(env.rank, world))
            for i in fx.range_constexpr(per_wave):
                place = wave * per_wave + i
                at = mine + fx.Int64(place) * KIB
                store = dev.store16_through if fx.const_expr(through) else dev.store16
                store_pattern(dev, store, at, env.rank, peer, env.round, lane, place)
            dev.wait_stores()
            if fx.const_expr(not through):
                fx.barrier()
                if wave == 0:
                    dev.release_fence("system")
                fx.barrier()
            if lane == 0:
                for i in range(per_wave):
                    offset = fx.Int64(wave * per_wave + i) * KIB
                    dev.put(queue, there + offset, mine + offset, KIB, signal=(flag, 1))
        else:
            sender = fx.block_idx.x - world
            flag = dev.my_address(env.flags, 0) + fx.Int64(sender) * 8
            dev.wait_at_least(flag, env.round * count, env.record, 1, sender, env.deadline)
            for i in fx.range_constexpr(per_wave):
                place = wave * per_wave + i
                copy_out(dev, env, dev.load16, sender, lane, place, incoming(sender, world))

    return launcher(puts_kernel, 2 * world, 64 * waves)


def lanes(dev, world, width):
    """One wave for each peer: `width` lanes put 256 bytes each, by one call and with one signal. Then the
    sender waits until its queue is quiet, and tells the peer by a store."""

    @flyc.kernel
    def lanes_kernel(args: fx.Int64):
        env = Env(dev, args)
        peer, lane = fx.block_idx.x, fx.thread_idx.x
        queue = dev.open_queue(dev.queue_address(env.queues, fx.Int64(peer)))
        mine = dev.my_address(env.data, outgoing(peer, world))
        there = dev.peer_address(env.data, peer, incoming(env.rank, world))
        for place in fx.range_constexpr(width // 4):
            at = mine + place * KIB
            store_pattern(dev, dev.store16_through, at, env.rank, peer, env.round, lane, place)
        dev.wait_stores()
        if lane < width:
            offset = fx.Int64(lane) * 256
            flag = dev.peer_address(env.flags, peer, 512) + fx.Int64(env.rank) * 8
            dev.put_lanes(queue, there + offset, mine + offset, 256, signal=(flag, 1))
        if dev.is_first_lane():
            dev.quiet(queue)
            told = dev.peer_address(env.flags, peer, 1024) + fx.Int64(env.rank) * 8
            dev.store_system(told, env.round)
        told = dev.my_address(env.flags, 1024) + fx.Int64(peer) * 8
        dev.wait_at_least(told, env.round, env.record, 2, peer, env.deadline)
        counted = dev.load_system(dev.my_address(env.flags, 512) + fx.Int64(peer) * 8)
        if lane == 0:
            fx.generic_store(dev.pointer(fx.Int64, env.out + fx.Int64(peer) * SLOT + 8 * KIB, 8), counted)
        for place in fx.range_constexpr(width // 4):
            copy_out(dev, env, dev.load16, peer, lane, place, incoming(peer, world))

    return launcher(lanes_kernel, world, 64)


def batch(dev, world, waves):
    """Each wave of a block makes three packets, with one doorbell: two copies and an addition."""

    @flyc.kernel
    def batch_kernel(args: fx.Int64):
        env = Env(dev, args)
        peer, wave, lane = fx.block_idx.x, fx.thread_idx.x // 64, fx.thread_idx.x % 64
        queue = dev.open_queue(dev.queue_address(env.queues, fx.Int64(peer)))
        mine = dev.my_address(env.data, outgoing(peer, world)) + fx.Int64(wave) * KIB
        there = dev.peer_address(env.data, peer, incoming(env.rank, world)) + fx.Int64(wave) * KIB
        store_pattern(dev, dev.store16_through, mine, env.rank, peer, env.round, lane, wave)
        dev.wait_stores()
        if lane == 0:
            start = dev.reserve(queue, 3)
            if start >= 0:
                at = dev.write_copy(queue, start, there, mine, 512)
                at = dev.write_copy(queue, at, there + 512, mine + 512, 512)
                flag = dev.peer_address(env.flags, peer, 1536) + fx.Int64(env.rank) * 8
                at = dev.write_add(queue, at, flag, 1)
                dev.commit(queue, start, at)
        flag = dev.my_address(env.flags, 1536) + fx.Int64(peer) * 8
        dev.wait_at_least(flag, env.round * waves, env.record, 3, peer, env.deadline)
        copy_out(dev, env, dev.load16, peer, lane, wave, incoming(peer, world))

    return launcher(batch_kernel, world, 64 * waves)


def loopback(dev, world):
    """A wave puts to its own GPU, waits until the queue is quiet, and reads where the bytes went. It has read
    there before, so its caches hold the old ones. Then a signal alone, and a wait for it."""

    @flyc.kernel
    def loopback_kernel(args: fx.Int64):
        env = Env(dev, args)
        lane = fx.thread_idx.x
        queue = dev.open_queue(dev.queue_address(env.queues, fx.Int64(env.rank)))
        mine = dev.my_address(env.data, outgoing(env.rank, world))
        there = dev.my_address(env.data, incoming(env.rank, world))
        before = dev.load16(there + fx.Int64(lane) * 16)
        store_pattern(dev, dev.store16, mine, env.rank, env.rank, env.round, lane, 0)
        dev.release_fence("system")
        if lane == 0:
            dev.put(queue, there, mine, KIB)
        quiet = fx.Int32(1)
        if lane == 0:
            quiet = fx.Int32(dev.quiet(queue))
        fx.barrier()  # the other lanes may not run ahead of the one that waits
        dev.store16(env.out + fx.Int64(lane) * 16, dev.load16(there + fx.Int64(lane) * 16))
        dev.store16(env.out + 2 * KIB + fx.Int64(lane) * 16, before)
        if lane == 0:
            flag = dev.my_address(env.flags, 2048)
            dev.signal(queue, flag, 5)
            came = dev.wait_at_least(flag, env.round * 5, env.record, 4, env.rank, env.deadline)
            found = fx.Int64(came) * 2 + fx.Int64(quiet)
            fx.generic_store(dev.pointer(fx.Int64, env.out + KIB, 8), found)

    return launcher(loopback_kernel, 1, 64)


def push(dev, world, through, fresh):
    """No engine: every wave stores its KiB straight into the peer, and a store of a flag says so."""
    waves = 2

    @flyc.kernel
    def push_kernel(args: fx.Int64):
        env = Env(dev, args)
        wave, lane = fx.thread_idx.x // 64, fx.thread_idx.x % 64
        if fx.block_idx.x < world:
            peer = fx.block_idx.x
            there = dev.peer_address(env.data, peer, incoming(env.rank, world)) + fx.Int64(wave) * KIB
            store = dev.store16_through if fx.const_expr(through) else dev.store16
            store_pattern(dev, store, there, env.rank, peer, env.round, lane, wave)
            dev.wait_stores()
            fx.barrier()
            if fx.thread_idx.x == 0:
                flag = dev.peer_address(env.flags, peer, 2560) + fx.Int64(env.rank) * 8
                if fx.const_expr(through):
                    dev.store_system(flag, env.round)
                else:
                    dev.store_release_system(flag, env.round)
        else:
            sender = fx.block_idx.x - world
            flag = dev.my_address(env.flags, 2560) + fx.Int64(sender) * 8
            dev.wait_at_least(flag, env.round, env.record, 5, sender, env.deadline)
            load = dev.load16_fresh if fx.const_expr(fresh) else dev.load16
            copy_out(dev, env, load, sender, lane, wave, incoming(sender, world))

    return launcher(push_kernel, 2 * world, 64 * waves)


def pull(dev, world):
    """A reader that polls a word and then loads past the caches, two addresses at a time, with no acquire."""

    @flyc.kernel
    def pull_kernel(args: fx.Int64):
        env = Env(dev, args)
        lane = fx.thread_idx.x
        peer = fx.block_idx.x
        if peer < world:
            mine = dev.my_address(env.data, outgoing(peer, world))
            for place in fx.range_constexpr(2):
                at = mine + place * KIB
                store_pattern(dev, dev.store16_through, at, env.rank, peer, env.round, lane, place)
            dev.wait_stores()
            if lane == 0:
                dev.add_system(dev.peer_address(env.flags, peer, 3072) + fx.Int64(env.rank) * 8, 1)
        else:
            sender = peer - world
            flag = dev.my_address(env.flags, 3072) + fx.Int64(sender) * 8
            dev.wait_at_least(flag, env.round, env.record, 6, sender, env.deadline)
            there = dev.peer_address(env.data, sender, outgoing(env.rank, world)) + fx.Int64(lane) * 16
            first, second = dev.load16_fresh(there, there + KIB)
            out = env.out + fx.Int64(sender) * SLOT + fx.Int64(lane) * 16
            dev.store16(out, first)
            dev.store16(out + KIB, second)

    return launcher(pull_kernel, 2 * world, 64)


def locked(dev, world, blocks):
    """Workgroups add to a cached counter, one at a time, under the lock of the queue to rank 0."""

    @flyc.kernel
    def locked_kernel(args: fx.Int64):
        env = Env(dev, args)
        if fx.thread_idx.x == 0:
            queue = dev.open_queue(dev.queue_address(env.queues, fx.Int64(0)))
            counter = dev.pointer(fx.Int64, env.spare, 8)
            for _ in range(3):
                if dev.lock_queue(queue):
                    fx.generic_store(counter, fx.generic_load(counter) + 1)
                    dev.unlock_queue(queue)

    return launcher(locked_kernel, blocks, 64)


def meet(dev, world, barriers):
    """Data into the next rank, a barrier of all, and a look at what came; the barriers follow one another."""

    @flyc.kernel
    def meet_kernel(args: fx.Int64):
        env = Env(dev, args)
        lane = fx.thread_idx.x
        for _ in fx.range_constexpr(barriers):
            dev.all_ranks_meet(env.flags, 4096, env.spare, env.record, 7, env.deadline, world)
        peer = (env.rank + 1) % world
        there = dev.peer_address(env.data, peer, incoming(env.rank, world))
        store_pattern(dev, dev.store16, there, env.rank, peer, env.round, lane, 0)
        dev.all_ranks_meet(env.flags, 4096, env.spare, env.record, 7, env.deadline, world)
        sender = (env.rank + world - 1) % world
        copy_out(dev, env, dev.load16, sender, lane, 0, incoming(sender, world))

    return launcher(meet_kernel, 1, 64)


def late(dev, world):
    """Block 0 waits for what never comes, and then for more, which must cost no time. Block 1 waits until the
    record is published, and copies what it says."""

    @flyc.kernel
    def late_kernel(args: fx.Int64):
        env = Env(dev, args)
        if fx.thread_idx.x == 0:
            if fx.block_idx.x == 0:
                flag = dev.my_address(env.flags, 5120)
                came = dev.wait_at_least(flag, 77, env.record, 9, 1, env.deadline, index=3)
                forever = dev.deadline_after(100_000_000_000)
                for _ in range(3):
                    dev.wait_at_least(flag, 78, env.record, 9, 1, forever)
                fx.generic_store(dev.pointer(fx.Int64, env.out, 8), fx.Int64(came))
            else:
                code = dev.load_system(env.record, fx.Int32)
                while code != 1:
                    fx.rocdl.s_sleep(1)
                    code = dev.load_system(env.record, fx.Int32)
                dev.acquire_fence("system")
                seen = fx.generic_load(dev.pointer(fx.Int32, env.record + 24, 4))
                fx.generic_store(dev.pointer(fx.Int32, env.out + 8, 4), seen)

    return launcher(late_kernel, 2, 64)


def whole(dev, world, nbytes):
    """One put of `nbytes` to oneself, with a signal."""

    @flyc.kernel
    def whole_kernel(args: fx.Int64):
        env = Env(dev, args)
        if fx.thread_idx.x == 0:
            queue = dev.open_queue(dev.queue_address(env.queues, fx.Int64(env.rank)))
            flag = dev.my_address(env.flags, 5632)
            mine = dev.my_address(env.data, outgoing(env.rank, world))
            dev.put(
                queue, dev.my_address(env.data, incoming(env.rank, world)), mine, nbytes, signal=(flag, 1)
            )
            dev.put(queue, mine, mine, 0, signal=(flag, 1))
            dev.put(queue, mine, mine, 0)
            dev.wait_at_least(flag, env.round * 2, env.record, 8, env.rank, env.deadline)

    return launcher(whole_kernel, 1, 64)


def slow_pattern(dev, world):
    """A row of this rank's for itself, after a while."""

    @flyc.kernel
    def slow_kernel(args: fx.Int64):
        env = Env(dev, args)
        until = dev.deadline_after(2_000_000)  # 20 ms
        while dev.clock() < until:
            fx.rocdl.s_sleep(8)
        mine = dev.my_address(env.data, outgoing(env.rank, world))
        store_pattern(dev, dev.store16, mine, env.rank, env.rank, env.round, fx.thread_idx.x, 0)

    return launcher(slow_kernel, 1, 64)


def look(dev, world):
    """What lies in the first incoming row."""

    @flyc.kernel
    def look_kernel(args: fx.Int64):
        env = Env(dev, args)
        copy_out(dev, env, dev.load16, 0, fx.thread_idx.x, 0, incoming(0, world))

    return launcher(look_kernel, 1, 64)
