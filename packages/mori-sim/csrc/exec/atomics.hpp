// Read-modify-write operations of FLAT/GLOBAL/BUFFER and DS, by the operation's name. `data2` is the second operand
// of compare-and-swap, mskor and wrap. All work on plain integers of 4 or 8 bytes.
#pragma once

#include <cstdint>
#include <cstring>

namespace mori_sim {

enum class Rmw : uint8_t {
  none, swap, cmpswap, add, sub, rsub, smin, smax, umin, umax, and_, or_, xor_, inc, dec, mskor, wrap,
  fadd, fmin, fmax, pk_add_f16, pk_add_bf16, fcmpswap,
};

uint16_t half_add(uint16_t a, uint16_t b);    // atomics.cpp; round to nearest even
uint16_t brain_add(uint16_t a, uint16_t b);

template <class U, class I, class F>
U rmw_value(Rmw op, U old, U data, U data2) {
  auto as_f = [](U v) { F f; std::memcpy(&f, &v, sizeof f); return f; };
  auto as_u = [](F f) { U v; std::memcpy(&v, &f, sizeof v); return v; };
  switch (op) {
    case Rmw::swap: return data;
    case Rmw::cmpswap: return old == data2 ? data : old;
    case Rmw::fcmpswap: return as_f(old) == as_f(data2) ? data : old;
    case Rmw::add: return old + data;
    case Rmw::sub: return old - data;
    case Rmw::rsub: return data - old;
    case Rmw::smin: return static_cast<I>(data) < static_cast<I>(old) ? data : old;
    case Rmw::smax: return static_cast<I>(data) > static_cast<I>(old) ? data : old;
    case Rmw::umin: return data < old ? data : old;
    case Rmw::umax: return data > old ? data : old;
    case Rmw::and_: return old & data;
    case Rmw::or_: return old | data;
    case Rmw::xor_: return old ^ data;
    case Rmw::inc: return old >= data ? 0 : old + 1;
    case Rmw::dec: return old == 0 || old > data ? data : old - 1;
    case Rmw::mskor: return (old & ~data) | data2;
    case Rmw::wrap: return old >= data ? old - data : old + data2;
    case Rmw::fadd: return as_u(as_f(old) + as_f(data));
    case Rmw::fmin: return as_f(data) < as_f(old) ? data : old;
    case Rmw::fmax: return as_f(data) > as_f(old) ? data : old;
    case Rmw::pk_add_f16: {
      U r = half_add(static_cast<uint16_t>(old), static_cast<uint16_t>(data));
      return r | static_cast<U>(half_add(static_cast<uint16_t>(old >> 16), static_cast<uint16_t>(data >> 16))) << 16;
    }
    case Rmw::pk_add_bf16: {
      U r = brain_add(static_cast<uint16_t>(old), static_cast<uint16_t>(data));
      return r | static_cast<U>(brain_add(static_cast<uint16_t>(old >> 16), static_cast<uint16_t>(data >> 16))) << 16;
    }
    case Rmw::none: break;
  }
  return old;
}

Rmw rmw_of(const char* name);  // "global_atomic_smax_x2", "ds_add_rtn_u32", ...

}  // namespace mori_sim
