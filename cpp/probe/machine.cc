// The public face of tier selection and probes, and of files that appear whole.
#include "helm/machine.h"

#include <cstring>
#include <system_error>

#include "base/arena.h"
#include "base/memory_node.h"
#include "base/part_file.h"
#include "cpu/integer_isa.h"
#include "cpu/isa.h"
#include "device/registry.h"
#include "probe/ceiling.h"

namespace helm {

std::vector<IsaTier> isa_tiers() {
  std::vector<IsaTier> tiers;
  for (const cpu::IsaStatus& status : cpu::isa_report()) {
    tiers.push_back({cpu::isa_name(status.isa), status.available, status.reason});
  }
  return tiers;
}

IsaChoice isa_choice() {
  std::string reason;
  const std::string name = cpu::select_kernels(&reason).name;
  return {name, reason};
}

std::vector<IsaTier> integer_isa_tiers() {
  std::vector<IsaTier> tiers;
  for (const cpu::IntegerStatus& status : cpu::integer_report()) {
    tiers.push_back({cpu::integer_name(status.isa), status.available, status.reason});
  }
  return tiers;
}

IsaChoice integer_isa_choice() {
  std::string reason;
  const std::string name = cpu::select_integer_kernels(&reason).name;
  return {name, reason};
}

DeviceInfo accelerator_info(const std::string& specification,
                            const std::vector<std::string>& cublas_directories) {
  return open_accelerator(specification, cublas_directories)->describe();
}

std::optional<int64_t> granted_huge_page_bytes(int64_t bytes) {
  const Arena arena(bytes, "a trial of huge pages");
  if (arena.bytes() > 0) std::memset(arena.data(), 1, static_cast<size_t>(arena.bytes()));
  return arena.huge_page_bytes();
}

std::string memory_node_refusal(int node) {
  const Arena arena(1, "a trial of a memory node");
  const int error = bind_memory(arena.data(), arena.bytes(), node);
  return error == 0 ? "" : std::generic_category().message(error);
}

void replace_file(const std::string& path, std::string_view content) {
  PartFile file(path, "[file] cannot write " + path);
  file.write(content.data(), content.size());
  file.finish();
}

double stream_read_bytes_per_s(int threads, int64_t bytes, double seconds) {
  return probe::stream_read_bytes_per_s(threads, bytes, seconds);
}

double fma_flops(int threads, double seconds) {
  return probe::fma_flops(threads, seconds);
}

}  // namespace helm
