// An AMDHSA code object: what the ELF file, its metadata note and its kernel descriptors say about each kernel.
//
// Parsing touches nothing but the given bytes. `place` lays the loadable segments out in memory that the caller
// allocated (image_nbytes of them, 4 KiB aligned) and applies the relocations; offsets in KernelInfo are then
// offsets into that memory.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace mori_sim {

struct KernelArgument {
  std::string name;
  uint32_t offset = 0;
  uint32_t nbytes = 0;
  std::string kind;  // metadata's value_kind: by_value, global_buffer, hidden_...
  bool hidden() const { return kind.rfind("hidden_", 0) == 0; }
};

// The 64 bytes at NAME.kd.
struct KernelDescriptor {
  uint32_t lds_nbytes;
  uint32_t scratch_nbytes;  // per lane
  uint32_t kernarg_nbytes;
  uint32_t reserved0;
  int64_t entry_offset;  // from the descriptor
  uint8_t reserved1[20];
  uint32_t rsrc3;
  uint32_t rsrc1;
  uint32_t rsrc2;
  uint16_t properties;
  uint16_t preload;
  uint32_t reserved2;
};
static_assert(sizeof(KernelDescriptor) == 64);

struct KernelInfo {
  std::string name;
  std::vector<KernelArgument> arguments;
  uint32_t kernarg_nbytes = 0;
  uint32_t lds_nbytes = 0;
  uint32_t scratch_nbytes = 0;
  uint32_t num_vgprs = 0;  // architectural and accumulation registers together, as allocated
  uint32_t num_agprs = 0;
  uint32_t num_sgprs = 0;
  uint32_t num_vgpr_spills = 0;
  uint32_t num_sgpr_spills = 0;
  uint32_t max_workgroup_size = 1024;
  uint32_t wave_size = 64;
  KernelDescriptor descriptor{};
  uint64_t descriptor_offset = 0;
  uint64_t entry_offset = 0;  // of the first instruction, in the image
  uint64_t code_nbytes = 0;   // of its function, as the symbol table says

  uint32_t accum_offset() const { return ((descriptor.rsrc3 & 0x3f) + 1) * 4; }  // first AGPR in the unified file
  uint32_t allocated_vgprs() const { return ((descriptor.rsrc1 & 0x3f) + 1) * 8; }
};

struct Symbol {
  uint64_t offset;
  uint64_t nbytes;
};

class CodeObject {
 public:
  // Throws std::runtime_error saying what is wrong with the bytes.
  static CodeObject parse(std::vector<uint8_t> file);
  // Size of an ELF image of which only the start is known: the furthest byte any header or segment names.
  static size_t file_nbytes(const void* image);

  uint64_t image_nbytes() const { return image_nbytes_; }
  void place(uint8_t* image, uint64_t address) const;
  // (offset in the image, "file:line") where the debug line table starts a new line; empty without debug info.
  std::vector<std::pair<uint64_t, std::string>> lines() const;

  std::string target;  // e.g. amdgcn-amd-amdhsa--gfx950
  std::vector<KernelInfo> kernels;
  std::map<std::string, Symbol> objects;  // global variables and kernel descriptors
  uint64_t text_offset = 0;
  uint64_t text_nbytes = 0;

 private:
  struct Segment {
    uint64_t file_offset, offset, file_nbytes, nbytes;
  };
  struct Relocation {
    uint64_t offset;
    uint32_t type;
    int64_t addend;
    uint64_t symbol_offset;
  };
  std::vector<uint8_t> file_;
  std::vector<Segment> segments_;
  std::vector<Relocation> relocations_;
  uint64_t image_nbytes_ = 0;
};

}  // namespace mori_sim
