#include "loader/code_object.hpp"

#include <elf.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "loader/msgpack.hpp"

namespace mori_sim {
namespace {

constexpr uint16_t kMachineAmdgpu = 224;
constexpr uint32_t kMachineFlagGfx950 = 0x4f;
constexpr uint32_t kNoteMetadata = 32;
constexpr uint64_t kMaxImage = 1ull << 30;
constexpr uint32_t kRelocAbs64 = 3, kRelocRelative64 = 13;

[[noreturn]] void refuse(const std::string& why) { throw std::runtime_error("code object: " + why); }

// Reads structures out of the file, each checked against its end.
class File {
 public:
  explicit File(const std::vector<uint8_t>& bytes) : bytes_(bytes) {}
  const uint8_t* span(uint64_t offset, uint64_t nbytes, const char* what) const {
    if (offset > bytes_.size() || nbytes > bytes_.size() - offset)
      refuse(std::string(what) + " lies outside of the file");
    return bytes_.data() + offset;
  }
  template <class T>
  T read(uint64_t offset, const char* what) const {
    T value;
    std::memcpy(&value, span(offset, sizeof value, what), sizeof value);
    return value;
  }
  std::string text(uint64_t table, uint64_t table_nbytes, uint64_t at) const {
    if (at >= table_nbytes) refuse("a name lies outside of its string table");
    const auto* from = reinterpret_cast<const char*>(span(table, table_nbytes, "string table"));
    return {from + at, strnlen(from + at, table_nbytes - at)};
  }

 private:
  const std::vector<uint8_t>& bytes_;
};

Elf64_Ehdr checked_header(const File& file) {
  const auto header = file.read<Elf64_Ehdr>(0, "ELF header");
  if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0) refuse("not an ELF file");
  if (header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_machine != kMachineAmdgpu)
    refuse("not a 64-bit AMDGPU file (e_machine " + std::to_string(header.e_machine) + ")");
  if ((header.e_flags & 0xff) != kMachineFlagGfx950) {
    char flags[16];
    std::snprintf(flags, sizeof flags, "%#x", header.e_flags & 0xff);
    refuse(std::string("compiled for machine ") + flags + ", this node is gfx950 (0x4f): set FLYDSL_GPU_ARCH=gfx950");
  }
  if (header.e_type != ET_DYN) refuse("not linked: a shared object is expected");
  return header;
}

KernelInfo kernel_from(const msgpack::Value& entry) {
  KernelInfo kernel;
  kernel.name = entry[".name"].text;
  for (const auto& argument : entry[".args"].list) {
    KernelArgument a;
    a.name = argument[".name"].text;
    a.offset = static_cast<uint32_t>(argument[".offset"].as_int());
    a.nbytes = static_cast<uint32_t>(argument[".size"].as_int());
    a.kind = argument[".value_kind"].text;
    kernel.arguments.push_back(std::move(a));
  }
  const auto number = [&](const char* key) { return static_cast<uint32_t>(entry[key].as_int()); };
  kernel.kernarg_nbytes = number(".kernarg_segment_size");
  kernel.lds_nbytes = number(".group_segment_fixed_size");
  kernel.scratch_nbytes = number(".private_segment_fixed_size");
  kernel.num_vgprs = number(".vgpr_count");
  kernel.num_agprs = number(".agpr_count");
  kernel.num_sgprs = number(".sgpr_count");
  kernel.num_vgpr_spills = number(".vgpr_spill_count");
  kernel.num_sgpr_spills = number(".sgpr_spill_count");
  kernel.max_workgroup_size = number(".max_flat_workgroup_size");
  kernel.wave_size = static_cast<uint32_t>(entry[".wavefront_size"].as_int(64));
  for (const auto& a : kernel.arguments)
    if (uint64_t{a.offset} + a.nbytes > kernel.kernarg_nbytes) refuse(kernel.name + ": an argument lies past the kernarg segment");
  if (kernel.kernarg_nbytes > 65536) refuse(kernel.name + ": kernarg segment of " + std::to_string(kernel.kernarg_nbytes) + " bytes");
  if (kernel.wave_size != 64) refuse(kernel.name + ": gfx950 has 64 lanes per wave, not " + std::to_string(kernel.wave_size));
  return kernel;
}

}  // namespace

size_t CodeObject::file_nbytes(const void* image) {
  Elf64_Ehdr header;
  std::memcpy(&header, image, sizeof header);
  if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0) refuse("not an ELF file (bundles are not accepted)");
  const auto* bytes = static_cast<const uint8_t*>(image);
  uint64_t end = std::max<uint64_t>(header.e_phoff + uint64_t{header.e_phnum} * sizeof(Elf64_Phdr),
                                    header.e_shoff + uint64_t{header.e_shnum} * sizeof(Elf64_Shdr));
  for (int i = 0; i < header.e_phnum; ++i) {
    Elf64_Phdr segment;
    std::memcpy(&segment, bytes + header.e_phoff + i * sizeof segment, sizeof segment);
    end = std::max(end, segment.p_offset + segment.p_filesz);
  }
  for (int i = 0; i < header.e_shnum; ++i) {
    Elf64_Shdr section;
    std::memcpy(&section, bytes + header.e_shoff + i * sizeof section, sizeof section);
    if (section.sh_type != SHT_NOBITS) end = std::max(end, section.sh_offset + section.sh_size);
  }
  if (end > kMaxImage) refuse("headers name bytes past 1 GiB");
  return end;
}

CodeObject CodeObject::parse(std::vector<uint8_t> bytes) {
  CodeObject object;
  object.file_ = std::move(bytes);
  const File file(object.file_);
  const Elf64_Ehdr header = checked_header(file);

  msgpack::Value metadata;
  std::vector<Elf64_Phdr> notes;
  for (int i = 0; i < header.e_phnum; ++i) {
    const auto segment = file.read<Elf64_Phdr>(header.e_phoff + i * sizeof(Elf64_Phdr), "program header");
    if (segment.p_type == PT_NOTE) notes.push_back(segment);
    if (segment.p_type != PT_LOAD) continue;
    if (segment.p_vaddr > kMaxImage || segment.p_memsz > kMaxImage || segment.p_filesz > segment.p_memsz)
      refuse("a segment is larger than 1 GiB or than its memory");
    file.span(segment.p_offset, segment.p_filesz, "segment");
    object.segments_.push_back({segment.p_offset, segment.p_vaddr, segment.p_filesz, segment.p_memsz});
    object.image_nbytes_ = std::max<uint64_t>(object.image_nbytes_, segment.p_vaddr + segment.p_memsz);
    if (segment.p_flags & PF_X) {
      object.text_offset = segment.p_vaddr;
      object.text_nbytes = segment.p_filesz;
    }
  }
  for (const auto& note : notes) {
    uint64_t at = note.p_offset;
    const uint64_t end = note.p_offset + note.p_filesz;
    file.span(note.p_offset, note.p_filesz, "note");
    while (at + sizeof(Elf64_Nhdr) <= end) {
      const auto entry = file.read<Elf64_Nhdr>(at, "note");
      const uint64_t name_at = at + sizeof entry, text_at = name_at + ((uint64_t{entry.n_namesz} + 3) & ~3ull);
      if (entry.n_type == kNoteMetadata && entry.n_namesz == 7 &&
          std::memcmp(file.span(name_at, 7, "note name"), "AMDGPU", 7) == 0)
        metadata = msgpack::parse(file.span(text_at, entry.n_descsz, "metadata"), entry.n_descsz);
      at = text_at + ((uint64_t{entry.n_descsz} + 3) & ~3ull);
    }
  }
  object.target = metadata["amdhsa.target"].text;

  std::map<std::string, Symbol> functions;
  for (int i = 0; i < header.e_shnum; ++i) {
    const auto section = file.read<Elf64_Shdr>(header.e_shoff + i * sizeof(Elf64_Shdr), "section header");
    if (section.sh_type != SHT_DYNSYM || section.sh_link >= header.e_shnum) continue;
    const auto names = file.read<Elf64_Shdr>(header.e_shoff + section.sh_link * sizeof(Elf64_Shdr), "section header");
    std::vector<Elf64_Sym> symbols(section.sh_size / sizeof(Elf64_Sym));
    std::memcpy(symbols.data(), file.span(section.sh_offset, symbols.size() * sizeof(Elf64_Sym), "symbols"),
                symbols.size() * sizeof(Elf64_Sym));
    for (const auto& symbol : symbols) {
      if (symbol.st_shndx == SHN_UNDEF) continue;
      const auto name = file.text(names.sh_offset, names.sh_size, symbol.st_name);
      const bool code = ELF64_ST_TYPE(symbol.st_info) == STT_FUNC;
      (code ? functions : object.objects)[name] = {symbol.st_value, symbol.st_size};
    }
    for (int j = 0; j < header.e_shnum; ++j) {
      const auto table = file.read<Elf64_Shdr>(header.e_shoff + j * sizeof(Elf64_Shdr), "section header");
      if (table.sh_type != SHT_RELA || !(table.sh_flags & SHF_ALLOC)) continue;
      for (uint64_t k = 0; k < table.sh_size / sizeof(Elf64_Rela); ++k) {
        const auto entry = file.read<Elf64_Rela>(table.sh_offset + k * sizeof(Elf64_Rela), "relocation");
        const uint64_t index = ELF64_R_SYM(entry.r_info);
        const uint32_t type = ELF64_R_TYPE(entry.r_info);
        if (index >= symbols.size() || (type != kRelocAbs64 && type != kRelocRelative64) ||
            (type == kRelocAbs64 && symbols[index].st_shndx == SHN_UNDEF))
          refuse("relocation type " + std::to_string(type) + " or its symbol is not supported");
        if (entry.r_offset > object.image_nbytes_ || object.image_nbytes_ - entry.r_offset < 8) refuse("a relocation lies outside of the image");
        object.relocations_.push_back({entry.r_offset, type, entry.r_addend, symbols[index].st_value});
      }
    }
  }

  for (const auto& entry : metadata["amdhsa.kernels"].list) {
    KernelInfo kernel = kernel_from(entry);
    const auto found = object.objects.find(entry[".symbol"].text);
    if (found == object.objects.end()) refuse(kernel.name + ": its descriptor symbol is missing");
    kernel.descriptor_offset = found->second.offset;
    bool loaded = false;
    for (const auto& s : object.segments_)
      if (kernel.descriptor_offset >= s.offset && kernel.descriptor_offset + 64 <= s.offset + s.file_nbytes) {
        kernel.descriptor = file.read<KernelDescriptor>(s.file_offset + kernel.descriptor_offset - s.offset, "descriptor");
        loaded = true;
      }
    if (!loaded) refuse(kernel.name + ": its descriptor is not in a loaded segment");
    kernel.entry_offset = kernel.descriptor_offset + kernel.descriptor.entry_offset;
    if (kernel.entry_offset < object.text_offset || kernel.entry_offset >= object.text_offset + object.text_nbytes)
      refuse(kernel.name + ": its entry lies outside of the code");
    const auto function = functions.find(kernel.name);
    kernel.code_nbytes = function != functions.end() ? function->second.nbytes
                                                     : object.text_offset + object.text_nbytes - kernel.entry_offset;
    kernel.code_nbytes = std::min(kernel.code_nbytes, object.text_offset + object.text_nbytes - kernel.entry_offset);
    object.kernels.push_back(std::move(kernel));
  }
  return object;
}

void CodeObject::place(uint8_t* image, uint64_t address) const {
  for (const auto& segment : segments_)
    std::memcpy(image + segment.offset, file_.data() + segment.file_offset, segment.file_nbytes);
  for (const auto& r : relocations_) {
    const uint64_t value = address + r.addend + (r.type == kRelocAbs64 ? r.symbol_offset : 0);
    std::memcpy(image + r.offset, &value, sizeof value);
  }
}

}  // namespace mori_sim
