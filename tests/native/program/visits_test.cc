// Weights that visit: page-locked as long as they are needed, whatever fails in between.
#include "program/visits.h"

#include <doctest/doctest.h>

#include <map>
#include <string_view>
#include <vector>

#include "base/arena.h"
#include "cpu/cpu_device.h"
#include "cpu/isa.h"
#include "cpu/stage.h"
#include "program/lower.h"
#include "tiny_model.h"
#include "weights/store.h"

namespace {

// The CPU, with a count of what is page-locked, that creates so many events.
class Counting final : public helm::Device {
 public:
  explicit Counting(helm::Device& cpu) : cpu_(cpu) {}

  helm::DeviceInfo describe() const override { return cpu_.describe(); }
  helm::DeviceAddress allocate(int64_t bytes, const char* purpose) override {
    return cpu_.allocate(bytes, purpose);
  }
  void release(helm::DeviceAddress address) override { cpu_.release(address); }
  std::byte* allocate_host(int64_t bytes, const char* purpose) override {
    return cpu_.allocate_host(bytes, purpose);
  }
  void release_host(std::byte* memory) override { cpu_.release_host(memory); }
  bool pin(const void* memory, int64_t bytes, bool written) override {
    if (refuses) return false;
    const auto* begin = static_cast<const std::byte*>(memory);
    CHECK(pinned.emplace(begin, Stretch{begin + bytes, written}).second);
    most_pinned = pinned;
    return true;
  }
  void unpin(const void* memory) override {
    CHECK(pinned.erase(static_cast<const std::byte*>(memory)) == 1);
  }
  std::unique_ptr<helm::Stream> create_stream() override { return cpu_.create_stream(); }
  std::unique_ptr<helm::Event> create_event() override {
    if (events-- == 0) throw helm::Error(helm::ErrorKind::kDevice, "no event");
    return cpu_.create_event();
  }
  bool takes(const helm::Format& format) const override { return cpu_.takes(format); }
  int64_t workspace_bytes(const helm::Plan& plan,
                          std::span<const helm::UnitSpec> units) const override {
    return cpu_.workspace_bytes(plan, units);
  }
  std::unique_ptr<helm::Stage> compile(const helm::StageSpec& spec) override {
    return cpu_.compile(spec);
  }

  struct Stretch {
    const std::byte* end;
    bool written;
  };
  // Whether all of [p, p + bytes) was locked, for reading alone or not.
  bool locked(const void* p, int64_t bytes, bool written) const {
    const auto* begin = static_cast<const std::byte*>(p);
    auto after = most_pinned.upper_bound(begin);
    if (after == most_pinned.begin()) return false;
    const Stretch& stretch = (--after)->second;
    return begin + bytes <= stretch.end && stretch.written == written;
  }

  std::map<const std::byte*, Stretch> pinned, most_pinned;
  bool refuses = false;
  int events = 0;

 private:
  helm::Device& cpu_;
};

}  // namespace

TEST_CASE("visiting weights are page-locked no longer than they visit") {
  helm::test::TinyShape shape;
  shape.devices = {"accelerator", "cpu", "cpu", "accelerator"};
  shape.visit_tokens = 8;
  shape.visit_pages = 20;
  shape.weight_dtype = "f16";  // copied, not used where they lie
  const helm::test::TinyModel model = helm::test::tiny_model(shape);
  const helm::Plan plan = helm::Plan::from_json(model.plan);
  const helm::cpu::KernelTable& kernels = helm::cpu::select_kernels();
  helm::ThreadPool threads(1);
  helm::cpu::CpuDevice cpu(kernels, threads);
  Counting device(cpu);
  helm::Account account(device, int64_t{1} << 30);
  helm::Account host(cpu, helm::Plan::kUnlimited);
  helm::EngineOptions options = model.options();
  device.events = 100;
  const helm::Weights weights(plan, options, kernels, threads, host, &account);
  const helm::Program program = helm::lower(plan).at(1);
  int refused = 0;
  for (bool whole = false; !whole; ++refused) {
    REQUIRE(refused < 10);
    device.events = refused;
    try {
      const helm::Visits visits(plan, program, weights, {}, account);
      whole = true;
    } catch (const helm::Error& error) {
      CHECK(error.kind() == helm::ErrorKind::kDevice);
    }
    CHECK(device.pinned.empty());
  }
  CHECK(refused > 1);
  CHECK_FALSE(device.most_pinned.empty());
}

TEST_CASE("what visits is page-locked wherever it lies, no memory page twice") {
  helm::test::TinyShape shape;
  shape.layers = 3;
  shape.devices = {"accelerator", "cpu", "cpu", "accelerator", "accelerator"};
  shape.visit_tokens = 8;
  shape.visit_pages = 20;
  const helm::cpu::KernelTable& kernels = helm::cpu::select_kernels();
  helm::ThreadPool threads(1);
  helm::cpu::CpuDevice cpu(kernels, threads);
  for (const char* loading : {"copied", "bound", "mapped", "disk"}) {
    CAPTURE(std::string(loading));
    shape.weight_dtype = std::string_view(loading) == "copied" ? "f16" : "f32";
    helm::test::TinyModel model = helm::test::tiny_model(shape);
    helm::EngineOptions options = model.options();
    const helm::test::TinyFolder folder;
    if (std::string_view(loading) == "mapped" || std::string_view(loading) == "disk") {
      const bool mapped = std::string_view(loading) == "mapped";
      model = mapped ? folder.mapped(model) : folder.on_disk(model, 1 << 20);
      options.tensors.clear();
      options.directory = folder.path();
    }
    const helm::Plan plan = helm::Plan::from_json(model.plan);
    for (const bool refuses : {false, true}) {
      Counting device(cpu);
      device.refuses = refuses;
      device.events = 100;
      helm::Account account(device, int64_t{1} << 30);
      helm::Account host(cpu, helm::Plan::kUnlimited);
      const helm::Weights weights(plan, options, kernels, threads, host, &account);
      helm::Arena pages(100 * plan.kv.page_bytes(0), "pages");
      int64_t visiting = 0;
      {
        const std::span<std::byte> kv(pages.data(), static_cast<size_t>(pages.bytes()));
        const helm::Visits visits(plan, helm::lower(plan).at(1), weights, kv, account);
        CHECK((visits.pageable_bytes() == 0) == !refuses);
        for (size_t i = 0; i < plan.tensors.size(); ++i) {
          const helm::TensorSpec& tensor = plan.tensors[i];
          if (!tensor.name.starts_with("block.0.") && !tensor.name.starts_with("block.1.")) {
            continue;
          }
          const void* place = helm::cpu::host_pointer(weights.on(helm::kCpu)[i].address);
          const int64_t bytes =
              plan.bytes(*plan.slice(static_cast<helm::TensorIndex>(i), helm::kCpu));
          CHECK(device.locked(place, bytes, false) == !refuses);
          visiting += bytes;
        }
        CHECK(device.locked(pages.data(), pages.bytes(), true) == !refuses);
        if (refuses) CHECK(visits.pageable_bytes() >= visiting + pages.bytes());
      }
      CHECK(device.pinned.empty());
      uintptr_t last_page = 0;
      for (const auto& [begin, stretch] : device.most_pinned) {
        CHECK(reinterpret_cast<uintptr_t>(begin) / 4096 > last_page);
        last_page = reinterpret_cast<uintptr_t>(stretch.end - 1) / 4096;
      }
    }
  }
}
