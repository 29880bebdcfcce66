// Matrix instructions: shapes from the mnemonic, operands as register rows. The arithmetic is in matrix.inc.
#include <cstdio>
#include <memory>
#include <mutex>

#include "exec/units.hpp"

namespace mori_sim {
namespace {

char element_type(const std::string& s) {
  if (s == "f32") return 'f';
  if (s == "f64") return 'd';
  if (s == "f16") return 'h';
  if (s == "bf16") return 'b';
  if (s == "i8") return 'i';
  if (s == "fp8") return '8';
  if (s == "bf8") return '5';
  if (s == "f8f6f4") return 'x';
  return 0;
}

const MatrixShape* shape_of(const char* name) {
  static std::vector<std::unique_ptr<MatrixShape>> kept;
  std::string n = name;
  size_t at = n.find("mfma_");
  if (at == std::string::npos || n.find("smfmac") != std::string::npos) return nullptr;
  n = n.substr(at + 5);
  if (n.compare(0, 6, "scale_") == 0) n = n.substr(6);
  std::vector<std::string> part;
  for (size_t p = 0; p <= n.size();) {
    size_t q = n.find('_', p);
    if (q == std::string::npos) q = n.size();
    part.push_back(n.substr(p, q - p));
    p = q + 1;
  }
  unsigned m, c, k, blocks = 1;
  if (part.size() < 3 || std::sscanf(part[1].c_str(), "%ux%ux%u", &m, &c, &k) != 3) return nullptr;
  size_t t = 2;
  if (part[t].back() == 'b' && std::sscanf(part[t].c_str(), "%ub", &blocks) == 1) ++t;
  if (t >= part.size()) return nullptr;
  char a = element_type(part[t]), b = t + 1 < part.size() ? element_type(part[t + 1]) : a;
  if (!a || !b) return nullptr;
  char out = part[0] == "i32" ? 'i' : part[0] == "f64" ? 'd' : 'f';
  static std::mutex guard;
  std::lock_guard<std::mutex> lock(guard);
  kept.push_back(std::make_unique<MatrixShape>(MatrixShape{name, static_cast<uint8_t>(m), static_cast<uint8_t>(c), static_cast<uint8_t>(k),
                                                           static_cast<uint8_t>(blocks), a, b, out, false}));
  return kept.back().get();
}

void run(Wave& w, const Op& op) {
  const MatrixShape& s = *static_cast<const MatrixShape*>(op.impl);
  static const MatrixFn multiply = matrix_kernel();
  MatrixCall c{};
  c.a = w.row(op.src[0]);
  c.b = w.row(op.src[1]);
  if (op.src[2] >= kVgpr) {
    c.c = w.row(op.src[2]);
  } else {
    c.c_splat = read32(w, op, op.src[2], 'f');
    c.c_splat64 = read64(w, op, op.src[2], 'd');
    if (s.out == 'i') c.c_splat = read32(w, op, op.src[2], 'i');
  }
  c.d = w.row(op.dst);
  if (op.info->format == Format::vop3px2)
    for (int k = 0; k < 2; ++k) {
      const uint32_t* r;
      if (op.scale[k] >= kVgpr) {
        r = w.row(op.scale[k]);
      } else {
        // An inline float constant stands for its exponent byte in every position the opsel may name.
        uint32_t v = read32(w, op, op.scale[k], 'f');
        for (unsigned i = 0; i < kLanes; ++i) w.ctx->fetch[k][i] = v;
        r = w.ctx->fetch[k];
      }
      (k ? c.scale_b : c.scale_a) = r;
    }
  c.op = &op;
  c.options = w.ctx->options;
  multiply(s, c);
  w.counters->mfma_flops += 2ull * s.m * s.n * s.k * s.blocks;
}

}  // namespace

RunFn matrix_unit(Op* op) {
  const MatrixShape* s = shape_of(op->info->name);
  if (!s || op->src[0] < kVgpr || op->src[1] < kVgpr) return nullptr;
  if (s->a == 'x' && (op->cbsz > 4 || op->blgp > 4)) return nullptr;
  op->impl = s;
  return run;
}

}  // namespace mori_sim
