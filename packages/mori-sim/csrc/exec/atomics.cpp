#include "exec/atomics.hpp"

#include <cmath>
#include <string>

namespace mori_sim {
namespace {
#include "exec/numbers.hpp"
}

uint16_t half_add(uint16_t a, uint16_t b) { return half_from_float_rne(half_to_float(a) + half_to_float(b)); }
uint16_t brain_add(uint16_t a, uint16_t b) { return brain_from_float(brain_to_float(a) + brain_to_float(b)); }

Rmw rmw_of(const char* name) {
  std::string n = name;
  auto has = [&](const char* s) { return n.find(s) != std::string::npos; };
  if (n.compare(0, 3, "ds_") == 0) {
    const bool f = has("_f32") || has("_f64");
    if (has("pk_add") && has("bf16")) return Rmw::pk_add_bf16;
    if (has("pk_add")) return Rmw::pk_add_f16;
    if (has("cmpst")) return f ? Rmw::fcmpswap : Rmw::cmpswap;
    if (has("wrxchg")) return Rmw::swap;
    if (has("rsub")) return Rmw::rsub;
    if (has("mskor")) return Rmw::mskor;
    if (has("wrap")) return Rmw::wrap;
    if (has("_add_")) return f ? Rmw::fadd : Rmw::add;
    if (has("_sub_")) return Rmw::sub;
    if (has("_inc_")) return Rmw::inc;
    if (has("_dec_")) return Rmw::dec;
    const bool s = has("_i32") || has("_i64");
    if (has("_min_")) return f ? Rmw::fmin : s ? Rmw::smin : Rmw::umin;
    if (has("_max_")) return f ? Rmw::fmax : s ? Rmw::smax : Rmw::umax;
    if (has("_and_")) return Rmw::and_;
    if (has("_xor_")) return Rmw::xor_;
    if (has("_or_")) return Rmw::or_;
    return Rmw::none;
  }
  size_t at = n.find("atomic_");
  if (at == std::string::npos) return Rmw::none;
  std::string op = n.substr(at + 7);
  if (op.size() > 3 && op.compare(op.size() - 3, 3, "_x2") == 0) op.resize(op.size() - 3);
  static const struct { const char* name; Rmw op; } kOps[] = {
      {"swap", Rmw::swap}, {"cmpswap", Rmw::cmpswap}, {"add", Rmw::add}, {"sub", Rmw::sub}, {"smin", Rmw::smin},
      {"smax", Rmw::smax}, {"umin", Rmw::umin}, {"umax", Rmw::umax}, {"and", Rmw::and_}, {"or", Rmw::or_},
      {"xor", Rmw::xor_}, {"inc", Rmw::inc}, {"dec", Rmw::dec}, {"add_f32", Rmw::fadd}, {"add_f64", Rmw::fadd},
      {"min_f64", Rmw::fmin}, {"max_f64", Rmw::fmax}, {"pk_add_f16", Rmw::pk_add_f16}, {"pk_add_bf16", Rmw::pk_add_bf16},
  };
  for (const auto& k : kOps)
    if (op == k.name) return k.op;
  return Rmw::none;
}

}  // namespace mori_sim
