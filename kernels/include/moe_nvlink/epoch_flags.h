// The cells by which ranks signal each other, and the bounded wait for a cell. The loops over peers
// are in peers.h. A cell is one 8-byte word {tag:7, count:25, epoch:32} with a single writer, so
// all of it arrives together. The tag stands for the sender's geometry, in combine for the type and
// width of its rows: if ranks dispatch through layers of different geometry in the same round, rows
// go to places where the receivers do not look. Epochs only go up and wrap after 2^32 rounds. They
// are compared by signed difference. A word that only some rounds write may be older than 2^31
// rounds, and would then seem to be ahead: its waiter says how far ahead the word can be.
#pragma once

#include "config.h"
#include "copy.h"
#include "memory_order.h"
#include "platform.h"
#include "workspace.h"

namespace moe_nvlink {

constexpr int kTagBits = 32 - kCountBits;

HD uint64_t pack_cell(uint32_t epoch, uint32_t count, uint32_t tag) {
  return static_cast<uint64_t>(tag << kCountBits | count) << 32 | epoch;
}
HD uint32_t cell_epoch(uint64_t cell) {
  return static_cast<uint32_t>(cell);
}
HD uint32_t cell_count(uint64_t cell) {
  return static_cast<uint32_t>(cell >> 32) & ((1u << kCountBits) - 1);
}
HD uint32_t cell_tag(uint64_t cell) {
  return static_cast<uint32_t>(cell >> (32 + kCountBits));
}

// What all ranks of a round must agree on, in 7 bits: of 128 pairs of geometries one shares a tag.
// Geometries that differ only in a capacity that is a power of two never share one: the factor is a
// de Bruijn sequence, whose bits read differently from every place. A test counts both.
HD uint32_t geometry_tag(const Geometry& geometry) {
  uint32_t mixed = static_cast<uint32_t>(geometry.top_k) * 0x85ebca6bu;
  mixed = (mixed ^ static_cast<uint32_t>(geometry.hidden_size)) * 0xc2b2ae35u;
  mixed = (mixed ^ mixed >> 15 ^ static_cast<uint32_t>(geometry.num_experts)) * 0x27d4eb2fu;
  mixed ^= static_cast<uint32_t>(geometry.max_tokens_per_rank) * 0x077cb531u;
  mixed ^= (geometry.formats >> kTagBits) * 0x9e3779b1u;
  // Last and unmixed: two formats, or two layers, of one geometry do not share a tag either. The host
  // says what of that holds if both differ (number_code() in exchange/arguments.py).
  return mixed >> kCountBits ^ (geometry.formats & ((1u << kTagBits) - 1));
}

// How far ahead a cell may be for a waiter that it has reached: of a cell that is rewritten in every
// round half of all epochs, which makes the comparison one by signed difference.
constexpr uint32_t kAnyAhead = 0x7fffffffu;

HD bool has_reached(uint64_t cell, uint32_t epoch, uint32_t most_ahead = kAnyAhead) {
  return cell_epoch(cell) - epoch <= most_ahead;
}

// {code:8, phase:8, peer:16, epoch:32}
HD uint64_t pack_fault(int code, int phase, int peer, uint32_t epoch) {
  return static_cast<uint64_t>(code) << 56 | static_cast<uint64_t>(phase) << 48 |
         static_cast<uint64_t>(peer) << 32 | epoch;
}

// How long one thread waits, for all its cells together. The clock starts at the first look that
// fails, so a thread that need not wait does not read the clock.
struct Patience {
  uint64_t timeout_ns;
  uint64_t start = 0;   // 0: no look has failed yet
  uint64_t waited = 0;  // what waited_ns() has returned last
  // Word by which the peers that change the awaited cells know of a sleeper; nullptr: do not sleep.
  MOE_NVLINK_HOST_ONLY(uint64_t* sleepers = nullptr;)
  MOE_NVLINK_HOST_ONLY(uint64_t next_signals_ns = 0;)

  HD explicit Patience(uint64_t nanoseconds) : timeout_ns(nanoseconds) {}

  // Nanoseconds since the first call. Never negative: a GPU's clock may read lower than before (the
  // driver sets it, one clock for all SMs), and an unsigned difference would then be above every
  // limit.
  HD uint64_t waited_ns() {
    const uint64_t now = now_ns();
    if (start == 0) start = now;
    const int64_t since = static_cast<int64_t>(now - start);
    waited = since > 0 ? static_cast<uint64_t>(since) : 0;
    // Above every limit, so the wait ends as one that has reached its own.
    MOE_NVLINK_HOST_ONLY(if (host::gives_up(waited, &next_signals_ns)) return ~uint64_t{0};)
    return waited;
  }
};

// Adds what one thread waits for one peer to this rank's totals. All CTAs of a launch wait at the same
// time, so one of them counts; for each peer one of its threads. The time ends with the last look that
// has failed: no clock is read after the cell has arrived.
struct WaitCount {
  uint64_t* total;  // nullptr: this thread does not count
  uint64_t before;  // loaded before the wait, so nothing waits for the load after it
  uint64_t waited;  // by this thread for other peers

  template <class Args>
  HD WaitCount(const Args& args, bool is_counted, int peer, const Patience& patience)
      : total(is_counted ? wait_totals(args) + peer : nullptr),
        before(is_counted ? load_word(total) : 0),
        waited(patience.waited) {}

  HD void end(const Patience& patience) const {
    if (total == nullptr || patience.waited <= waited) return;
    store_word(total, before + (patience.waited - waited));
  }
};

// Reads the cell until it has reached the epoch; returns false if the time is over. `seen` is what
// the last look found. Orders nothing.
HD bool is_reached_in_time(const uint64_t* cell, uint32_t epoch, Patience& patience, uint64_t& seen,
                           uint32_t most_ahead = kAnyAhead) {
  Backoff backoff;
  while (!has_reached(seen = load_relaxed_sys(cell), epoch, most_ahead)) {
    const uint64_t waited = patience.waited_ns();
    if (waited > patience.timeout_ns) return false;
    MOE_NVLINK_HOST_ONLY(if (patience.sleepers != nullptr && backoff.may_sleep(waited)) {
      if (!host::sleep_until_changed(cell, seen, patience.sleepers)) patience.sleepers = nullptr;
      patience.waited_ns();  // the sleep counts as waited (WaitCount)
      continue;
    })
    backoff.pause(waited);
  }
  return true;
}

HD bool is_reached_in_time(const uint64_t* cell, uint32_t epoch, Patience& patience,
                           uint32_t most_ahead = kAnyAhead) {
  uint64_t seen;
  return is_reached_in_time(cell, epoch, patience, seen, most_ahead);
}

// Waits until the cell has reached the epoch. On 0, all that the cell's writer did before releasing
// it is visible to this thread; otherwise a kFault* code.
HD int wait_for_epoch(const uint64_t* cell, uint32_t epoch, Patience& patience, uint64_t* seen,
                      uint32_t most_ahead = kAnyAhead) {
  if (!is_reached_in_time(cell, epoch, patience, most_ahead)) return kFaultTimeout;
  // The acquire half of P1 (dispatch), P3 (combine), P6 (gather), P8 (argmax) and P11 (small
  // dispatch). If this load were relaxed, what is read afterwards might be older than the cell.
  *seen = load_acquire_sys(cell);
  // A healthy peer is never ahead: to end a round it needs this rank's signal of that round. A peer
  // that is ahead has gone on after a failure, and its rows are of another round. The epoch
  // compared is the acquired one, not the polled one. If no use were made of the acquired epoch,
  // ptxas would drop this load (combine) or halve it (dispatch), and count and epoch would come
  // from two loads.
  return cell_epoch(*seen) == epoch ? 0 : kFaultAhead;
}

// Not 0 if a verb of this rank has failed before. After a failure the rank's verbs exchange nothing,
// so a late peer gets no rows of a round that it has not started. The host stops calling the verbs,
// but verbs that are already in a stream or a graph still run.
template <class Args>
HD uint64_t load_fault(const Args& args) {
  return load_relaxed_sys(&local_control(args)->fault);
}

template <class Args>
HD bool has_failed(const Args& args) {
  return load_fault(args) != 0;
}

// Writes a fault word for the host, which raises an error that names phase, peer and epoch. The
// first fault stays, because later faults follow from it. If the host cannot read this rank's
// workspace without waiting for the device, it has named a word of its own memory. A GPU reaches
// that word in global space, because the host has pinned and mapped it.
template <class Args>
HD void leave_fault(const Args& args, uint64_t fault) {
  if (has_failed(args)) return;
  LocalControl* local = local_control(args);
  store_relaxed_sys(&local->fault, fault);
  const uint64_t host_fault = load_word(&local->host_fault);
  if (host_fault != 0) store_relaxed_sys(reinterpret_cast<uint64_t*>(host_fault), fault);
}

// Leaves the fault that a wait for a peer has ended with. Waits first for this rank's own cell of
// the round in `cells`. The CTA that sends the cell checks for failures of earlier verbs first. If it
// took this fault for such a failure, it would not signal, and the peers would report a missing rank
// instead of the cause.
template <class Args>
HD void report_fault(const Args& args, uint32_t cells, int code, int phase, int peer,
                     uint32_t epoch, Patience& patience) {
  const int me = rank_in(args.geometry);
  is_reached_in_time(cell_of(args, me, cells, me), epoch, patience);
  leave_fault(args, pack_fault(code, phase, peer, epoch));
}

}  // namespace moe_nvlink
