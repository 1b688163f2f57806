#include "probe/timed_stages.h"

#include <cstring>
#include <utility>

#include "base/arena.h"

namespace helm::probe {

void fill(std::byte* to, int64_t bytes, ThreadPool& threads) {
  constexpr int64_t kTilesPerPage = 2;
  const std::vector<uint16_t>& tile = noise();
  const auto tile_bytes = static_cast<int64_t>(tile.size() * sizeof(uint16_t));
  threads.run([&](Team& team) {
    for (int64_t offset = 0; offset < bytes; offset += tile_bytes) {
      const int64_t page = offset / (kTilesPerPage * tile_bytes);
      if (member_for_page(page, team.size()) != team.worker()) continue;
      std::memcpy(to + offset, tile.data(),
                  static_cast<size_t>(std::min(tile_bytes, bytes - offset)));
    }
  });
}

namespace {

void time_stage(const Timed& timed, Cpu& cpu, ProbeTiming& timing) {
  time_run(cpu, timing, [&] { timed.stage->run(*cpu.stream, timed.first_page); });
}

}  // namespace

void time_all(const std::vector<Timed>& stages, std::vector<ProbeTiming>& timings, Cpu& cpu,
              double seconds) {
  const Clock::time_point start = Clock::now();
  std::vector<ProbeTiming> first = timings;
  for (const Timed& timed : stages) time_stage(timed, cpu, first[timed.timing]);
  if (std::all_of(first.begin(), first.end(),
                  [](const ProbeTiming& t) { return t.undisturbed_s.empty(); })) {
    timings = std::move(first);
    return;
  }
  for (bool whole_round = false; !whole_round || since(start) < seconds; whole_round = true) {
    for (const Timed& timed : stages) {
      time_stage(timed, cpu, timings[timed.timing]);
      if (whole_round && since(start) >= seconds) return;
    }
  }
}

}  // namespace helm::probe
