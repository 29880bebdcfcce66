#include "loader/msgpack.hpp"

#include <cstring>
#include <stdexcept>

namespace mori_sim::msgpack {
namespace {

constexpr int kMaxDepth = 32;

class Reader {
 public:
  Reader(const uint8_t* at, size_t nbytes) : at_(at), end_(at + nbytes) {}

  Value value(int depth) {
    if (depth > kMaxDepth) throw std::runtime_error("code object metadata nests too deep");
    const uint8_t tag = *take(1);
    if (tag < 0x80) return integer(tag);
    if (tag >= 0xe0) return integer(static_cast<int8_t>(tag));
    if (tag < 0x90) return table(tag & 0x0f, depth);
    if (tag < 0xa0) return list(tag & 0x0f, depth);
    if (tag < 0xc0) return text(tag & 0x1f);
    switch (tag) {
      case 0xc0: return {};
      case 0xc2: return boolean(false);
      case 0xc3: return boolean(true);
      case 0xc4: case 0xd9: return text(big_endian(1));
      case 0xc5: case 0xda: return text(big_endian(2));
      case 0xc6: case 0xdb: return text(big_endian(4));
      case 0xca: return real(bits_as<float>(static_cast<uint32_t>(big_endian(4))));
      case 0xcb: return real(bits_as<double>(big_endian(8)));
      case 0xcc: return integer(big_endian(1));
      case 0xcd: return integer(big_endian(2));
      case 0xce: return integer(big_endian(4));
      case 0xcf: return integer(big_endian(8));
      case 0xd0: return integer(static_cast<int8_t>(big_endian(1)));
      case 0xd1: return integer(static_cast<int16_t>(big_endian(2)));
      case 0xd2: return integer(static_cast<int32_t>(big_endian(4)));
      case 0xd3: return integer(static_cast<int64_t>(big_endian(8)));
      case 0xdc: return list(big_endian(2), depth);
      case 0xdd: return list(big_endian(4), depth);
      case 0xde: return table(big_endian(2), depth);
      case 0xdf: return table(big_endian(4), depth);
      default: throw std::runtime_error("code object metadata holds an unknown msgpack type");
    }
  }

 private:
  const uint8_t* take(size_t nbytes) {
    if (nbytes > static_cast<size_t>(end_ - at_)) throw std::runtime_error("code object metadata ends early");
    const uint8_t* here = at_;
    at_ += nbytes;
    return here;
  }
  uint64_t big_endian(int nbytes) {
    uint64_t bits = 0;
    for (const uint8_t* p = take(nbytes); nbytes-- > 0; ++p) bits = bits << 8 | *p;
    return bits;
  }
  template <class To, class From>
  static To bits_as(From bits) {
    static_assert(sizeof(To) == sizeof(From));
    To value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
  static Value integer(int64_t number) {
    Value v;
    v.kind = Value::Kind::integer;
    v.integer = number;
    return v;
  }
  static Value boolean(bool set) {
    Value v = integer(set);
    v.kind = Value::Kind::boolean;
    return v;
  }
  static Value real(double number) {
    Value v;
    v.kind = Value::Kind::real;
    v.real = number;
    return v;
  }
  Value text(size_t nbytes) {
    Value v;
    v.kind = Value::Kind::text;
    v.text.assign(reinterpret_cast<const char*>(take(nbytes)), nbytes);
    return v;
  }
  // A count is never trusted with memory: elements are read one by one, and each takes at least one byte.
  Value list(size_t count, int depth) {
    Value v;
    v.kind = Value::Kind::list;
    while (count-- > 0) v.list.push_back(value(depth + 1));
    return v;
  }
  Value table(size_t count, int depth) {
    Value v;
    v.kind = Value::Kind::table;
    while (count-- > 0) {
      Value key = value(depth + 1);
      v.table[key.text] = value(depth + 1);
    }
    return v;
  }

  const uint8_t* at_;
  const uint8_t* end_;
};

}  // namespace

const Value& Value::operator[](const std::string& key) const {
  static const Value nil;
  const auto found = table.find(key);
  return found == table.end() ? nil : found->second;
}

Value parse(const uint8_t* bytes, size_t nbytes) { return Reader(bytes, nbytes).value(0); }

}  // namespace mori_sim::msgpack
