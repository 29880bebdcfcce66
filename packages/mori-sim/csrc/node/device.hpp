// What the node says about one of its devices: an MI355X as publicly documented.
#pragma once
#include <algorithm>
#include <cstdint>

#include "loader/code_object.hpp"

namespace mori_sim::mi355x {

constexpr const char* kName = "AMD Instinct MI355X (mori-sim)";
constexpr const char* kArch = "gfx950:sramecc+:xnack-";
constexpr uint64_t kMemoryBytes = 288ull << 30;
constexpr int kNumCus = 256, kNumXcds = 8, kSimdsPerCu = 4, kWavesPerSimd = 8, kLanes = 64;
constexpr int kMaxWorkgroup = 1024;
constexpr uint32_t kLdsBytes = 160 * 1024;
constexpr int kRegistersPerSimdLane = 512;
constexpr int kClockKhz = 2400000, kMemoryClockKhz = 2000000, kMemoryBusBits = 8192, kTimerKhz = 100000;
constexpr int kL2Bytes = 4 << 20;
constexpr int kChipId = 30112;
constexpr int kHipVersion = 70125424;  // the API revision whose structures and import rule the stub follows

constexpr int kOrdinaryEngines = 2, kXgmiEngines = 14;

}  // namespace mori_sim::mi355x

namespace mori_sim {

// Waves of a kernel that fit one SIMD by registers: 512 for each lane, handed out in eights.
inline int waves_per_simd(const KernelInfo& kernel) {
  const int registers = static_cast<int>((std::max<uint32_t>(kernel.num_vgprs, 1) + 7) / 8 * 8);
  return std::min(mi355x::kWavesPerSimd, mi355x::kRegistersPerSimdLane / registers);
}

// Workgroups that one CU holds at a time, by registers, wave slots and LDS. 0: not even one fits.
inline int workgroups_per_cu(const KernelInfo& kernel, uint32_t work_items, uint32_t dynamic_lds) {
  const int waves = static_cast<int>((work_items + mi355x::kLanes - 1) / mi355x::kLanes);
  if (waves == 0) return 0;
  const int per_simd = (waves + mi355x::kSimdsPerCu - 1) / mi355x::kSimdsPerCu;
  const int by_waves = waves >= mi355x::kSimdsPerCu ? waves_per_simd(kernel) / per_simd
                                                    : waves_per_simd(kernel) * mi355x::kSimdsPerCu / waves;
  const uint32_t lds = kernel.lds_nbytes + dynamic_lds;
  const int by_lds = lds > 0 ? static_cast<int>(mi355x::kLdsBytes / lds) : by_waves;
  return std::min(by_waves, by_lds);
}

}  // namespace mori_sim
