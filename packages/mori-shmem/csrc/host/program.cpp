#include "host/program.h"

#include <algorithm>

namespace mori {

namespace {

constexpr uint64_t kMaxFill = 1u << 22;
constexpr uint64_t kMostBytes = uint64_t{1} << 47;  // keeps sums of offsets far from overflow

// Bytes from the first to the last of a block of rows.
uint64_t extent(const char* what, uint64_t row_bytes, uint64_t num_rows, uint64_t pitch) {
  if (row_bytes > kMostBytes) throw bad_value("put_2d: row_bytes", row_bytes, "no more than the window holds");
  if (num_rows > 1 && pitch > kMostBytes / (num_rows - 1)) throw bad_value(what, pitch, "a pitch that stays in the window");
  return (num_rows - 1) * pitch + row_bytes;
}

}  // namespace

void Packets::append(const mori_sdma_packet& packet) {
  const size_t before = dwords.size();
  uint32_t num_dwords = 0;
  dwords.resize(before + 8 + packet.nbytes / 4 * (packet.op == MORI_SDMA_WRITE));
  const uint32_t room = static_cast<uint32_t>(dwords.size() - before);
  const mori_sdma_reason reason = mori_sdma_encode(&packet, 0, dwords.data() + before, room, &num_dwords);
  dwords.resize(before + num_dwords);
  if (reason != MORI_SDMA_OK)
    throw bad_value(mori_sdma_op_name(packet.op, packet.sub_op), uint64_t{packet.value}, mori_sdma_reason_name(reason));
  ends.push_back(dwords.size());
}

void Program::copy(uint64_t dst, uint64_t src, uint64_t nbytes) {
  const uint64_t most = mori_sdma_max_copy(0);
  for (uint64_t done = 0; done < nbytes; done += most) {
    mori_sdma_packet packet{};
    packet.op = MORI_SDMA_COPY;
    packet.dst = dst + done;
    packet.src = src + done;
    packet.nbytes = std::min(most, nbytes - done);
    packets_.append(packet);
  }
}

void Program::put(uint64_t dst, uint64_t src, uint64_t nbytes) {
  const View view(space_);
  view.require("put: dst", dst, nbytes);
  view.require("put: src", src, nbytes);
  copy(dst, src, nbytes);
}

void Program::put_2d(uint64_t dst, uint64_t src, uint64_t row_bytes, uint64_t num_rows, uint64_t dst_pitch,
                     uint64_t src_pitch) {
  if (row_bytes == 0 || num_rows == 0) return;
  if (num_rows > 1 && dst_pitch < row_bytes) throw bad_value("put_2d: dst_pitch", dst_pitch, "row_bytes or more");
  const View view(space_);
  view.require("put_2d: dst", dst, extent("put_2d: dst_pitch", row_bytes, num_rows, dst_pitch));
  view.require("put_2d: src", src, extent("put_2d: src_pitch", row_bytes, num_rows, src_pitch));
  if (dst_pitch == row_bytes && src_pitch == row_bytes) return copy(dst, src, row_bytes * num_rows);
  for (uint64_t row = 0; row < num_rows; ++row) copy(dst + row * dst_pitch, src + row * src_pitch, row_bytes);
}

void Program::fill(uint64_t dst, uint32_t pattern, uint64_t nbytes) {
  if (nbytes % 4) throw bad_value("fill: nbytes", nbytes, "a multiple of 4");
  View(space_).require("fill: dst", dst, nbytes, 4);
  for (uint64_t done = 0; done < nbytes; done += kMaxFill) {
    mori_sdma_packet packet{};
    packet.op = MORI_SDMA_FILL;
    packet.func = MORI_SDMA_FILL_DWORD;
    packet.dst = dst + done;
    packet.value = pattern;
    packet.nbytes = std::min(kMaxFill, nbytes - done);
    packets_.append(packet);
  }
}

void Program::signal(uint64_t where, uint64_t value, SignalOp op) {
  View(space_).require("signal", where, 8, 8);
  mori_sdma_packet packet{};
  packet.dst = where;
  packet.value = value;
  if (op == SignalOp::kAdd) {
    packet.op = MORI_SDMA_ATOMIC;
    packet.func = MORI_SDMA_ATOMIC_ADD;
    return packets_.append(packet);
  }
  packet.op = MORI_SDMA_FENCE;
  packet.value = value & UINT32_MAX;
  packets_.append(packet);
  packet.dst = where + 4;
  packet.value = value >> 32;
  packets_.append(packet);
}

void Program::wait(uint64_t where, uint64_t value, uint32_t comparison) {
  if (value > UINT32_MAX) throw bad_value("wait: value", value, "less than 2**32: a queue compares 32 bits");
  View(space_).require("wait", where, 8, 8);
  mori_sdma_packet packet{};
  packet.op = MORI_SDMA_POLL;
  packet.func = comparison;
  packet.dst = where;
  packet.value = value;
  packet.compare = UINT32_MAX;
  packet.interval = 4;
  packet.retry = 0xfff;
  packets_.append(packet);
}

void Program::timestamp(uint64_t where) {
  View(space_).require("timestamp", where, 8, 8);
  mori_sdma_packet packet{};
  packet.op = MORI_SDMA_TIMESTAMP;
  packet.sub_op = MORI_SDMA_TIMESTAMP_GET_GLOBAL;
  packet.dst = where;
  packets_.append(packet);
}

}  // namespace mori
