// Weights that members of the team load for themselves, in kernels' calls and in whole engines.
#include "weights/first_touch.h"

#include <doctest/doctest.h>

#include <atomic>
#include <filesystem>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "affinity.h"
#include "cpu/stage.h"
#include "helm/engine.h"
#include "support/host_memory.h"
#include "tiny_model.h"
#include "weights/store.h"

namespace {

using helm::Engine;
using helm::Plan;
using helm::Team;
using helm::TensorShare;
using helm::ThreadPool;
using helm::test::allowed_cpus;
using helm::test::large_shape;
using helm::test::logits_of;
using helm::test::one_cpu_each;
using helm::test::tiny_model;
using helm::test::TinyModel;
using helm::test::token_ids;

}  // namespace

// --- loading -------------------------------------------------------------------------------------

namespace {

// Where each member's conversions went. The first five of each, as many as it has of its own at
// least, one per op, wait for all others', so that nobody helps before.
struct Conversions {
  static constexpr size_t kOwn = 5;

  std::map<std::thread::id, size_t> member;
  std::vector<std::vector<uintptr_t>> to;  // [members]
  std::atomic<size_t> begun{0};
};
Conversions* conversions = nullptr;

void narrow_recorded(const float* from, void* to, int64_t n) {
  helm::cpu::kernels_scalar()->narrow[static_cast<int>(helm::DType::kF16)](from, to, n);
  auto& own = conversions->to[conversions->member.at(std::this_thread::get_id())];
  own.push_back(reinterpret_cast<uintptr_t>(to));
  if (own.size() > Conversions::kOwn) return;
  ++conversions->begun;
  const size_t all = own.size() * conversions->to.size();
  while (conversions->begun.load() < all) std::this_thread::yield();
}

}  // namespace

TEST_CASE("each member loads the rows that it reads") {
  for (const int members : {1, 2, 5}) {
    const TinyModel model = tiny_model(large_shape(members, "f16"));
    const Plan plan = Plan::from_json(model.plan);
    ThreadPool pool(members);
    std::vector<std::thread::id> ids(static_cast<size_t>(members));
    pool.run(
        [&](Team& team) { ids[static_cast<size_t>(team.worker())] = std::this_thread::get_id(); });
    Conversions seen;
    for (size_t i = 0; i < ids.size(); ++i) seen.member[ids[i]] = i;
    seen.to.resize(ids.size());
    helm::cpu::KernelTable kernels = *helm::cpu::kernels_scalar();
    kernels.narrow[static_cast<int>(helm::DType::kF16)] = narrow_recorded;
    conversions = &seen;
    helm::test::HostMemory host(pool);
    const helm::Weights weights(plan, model.options(), kernels, pool, host.account, nullptr);
    conversions = nullptr;
    const auto shares =
        helm::decode_shares(plan, std::vector<bool>(plan.units.size(), true), members);
    std::map<uintptr_t, int> owner;  // by where a share begins
    for (size_t i = 0; i < shares.size(); ++i) {
      const auto base = static_cast<uintptr_t>(weights.on(helm::kCpu)[i].address);
      for (const TensorShare& share : shares[i]) {
        owner[base + static_cast<uintptr_t>(share.begin * plan.tensors[i].cols()) * 2] =
            share.member;
      }
    }
    for (int member = 0; member < members; ++member) {
      const std::vector<uintptr_t>& to = seen.to[static_cast<size_t>(member)];
      REQUIRE(to.size() >= Conversions::kOwn);
      for (size_t i = 0; i < Conversions::kOwn; ++i) CHECK(owner.at(to[i]) == member);
    }
  }
}

// --- the engine ----------------------------------------------------------------------------------

namespace {

std::set<pid_t> threads_of_process() {
  std::set<pid_t> ids;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
    ids.insert(std::stoi(entry.path().filename()));
  }
  return ids;
}

}  // namespace

TEST_CASE("an engine asks for its threads' CPUs and leaves the caller's alone") {
  const std::vector<int> before = allowed_cpus();
  const std::vector<int> cpus = one_cpu_each(3);
  const TinyModel model = tiny_model(large_shape(3, "f16"));
  helm::EngineOptions options = model.options();
  options.cpus = cpus;
  int reports = 0;
  options.progress = [&](int64_t, int64_t) {
    CHECK(allowed_cpus() == before);
    ++reports;
  };
  const std::set<pid_t> others = threads_of_process();
  Engine engine(Plan::from_json(model.plan), options);
  CHECK(reports > 0);
  CHECK(engine.stats().cpus == cpus);
  std::multiset<int> asked;
  for (const pid_t thread : threads_of_process()) {
    if (others.count(thread) > 0) continue;
    const std::vector<int> allowed = allowed_cpus(thread);
    REQUIRE(allowed.size() == 1);
    asked.insert(allowed[0]);
  }
  CHECK(asked == std::multiset<int>(cpus.begin() + 1, cpus.end()));
  CHECK(allowed_cpus() == before);
  CHECK(logits_of(engine, token_ids(20, 3)).size() == 1021);
  CHECK(allowed_cpus() == before);
}

TEST_CASE("weights that members load for themselves are those of the model") {
  const TinyModel alone = tiny_model(large_shape(1, "bf16"));
  Engine reference(Plan::from_json(alone.plan), alone.options());
  const std::vector<float> expected = logits_of(reference, token_ids(20, 3));
  for (const int threads : {2, 3, 7}) {
    const TinyModel model = tiny_model(large_shape(threads, "bf16"));
    for (const bool pinned : {false, true}) {
      helm::EngineOptions options = model.options();
      if (pinned) options.cpus = one_cpu_each(threads);
      Engine engine(Plan::from_json(model.plan), options);
      CHECK(logits_of(engine, token_ids(20, 3)) == expected);
    }
  }
}

TEST_CASE("CPUs that do not go with the threads are refused") {
  const TinyModel model = tiny_model(large_shape(2));
  helm::EngineOptions options = model.options();
  options.cpus = {0};
  CHECK_THROWS_WITH(Engine(Plan::from_json(model.plan), options),
                    "[engine] 1 CPUs were named for 2 threads; name one for each thread, or none");
  options.cpus = {0, -3};
  CHECK_THROWS_WITH(Engine(Plan::from_json(model.plan), options),
                    "[engine] CPU -3 was named; expected 0 or more");
}
