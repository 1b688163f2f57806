// Which mode steps take: against every choice that there is, and how long far rows wait.
#include "serve/step_mode.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <set>
#include <vector>

#include "serve/virtual_server.h"

namespace {

using helm::ModeChoice;
using helm::ModeChooser;
using helm::ModeSet;
using helm::ModeSnapshot;
using helm::Predictor;
using helm::StepLoad;
using helm::StepMode;
using helm::test::VirtualMachine;

ModeSet modes(std::initializer_list<StepMode> list) {
  ModeSet set;
  for (const StepMode mode : list) set.set(static_cast<size_t>(mode));
  return set;
}
const ModeSet kAll = modes({StepMode::kNear, StepMode::kJoint, StepMode::kSplit});

// Of 32 layers; the rates of a small GPU, or of one that is much faster than the CPU.
VirtualMachine machine(double gpu_gb_per_s, double cpu_gb_per_s) {
  return {"",    32,    400e6,
          200e6, 16384, gpu_gb_per_s * 1e9,
          30e12, 15e12, cpu_gb_per_s * 1e9,
          10e9,  5e-5,  0.2e9,
          4096,  4096,  1 << 20,
          512,   64};
}

ModeChooser chooser(const VirtualMachine& machine, ModeSet allowed) {
  return ModeChooser(Predictor(machine.tables(), helm::test::kVirtualPage), allowed);
}

ModeSnapshot snapshot(int64_t near, int64_t far, int64_t length) {
  ModeSnapshot found;
  for (int64_t i = 0; i < near + far; ++i) found.rows.push_back({length, i >= near, 0, 0});
  found.most_rows = 512;
  found.most_outputs = 64;
  return found;
}

std::vector<size_t> far_of(const ModeChoice& choice) {
  std::vector<size_t> all = choice.far;
  all.insert(all.end(), choice.second.begin(), choice.second.end());
  return all;
}

}  // namespace

TEST_CASE("few far rows join, many are split off, and where the GPU is fast they wait") {
  const VirtualMachine small = machine(250, 50), fast = machine(3000, 30);
  CHECK(chooser(small, kAll).choose(snapshot(2, 0, 400)).mode == StepMode::kNear);
  ModeChoice choice = chooser(small, kAll).choose(snapshot(2, 4, 400));
  CHECK(choice.mode == StepMode::kJoint);
  CHECK(choice.far.size() == 4);
  choice = chooser(small, kAll).choose(snapshot(4, 60, 400));
  CHECK(choice.mode == StepMode::kSplit);
  CHECK(choice.second.size() > 10);
  choice = chooser(fast, kAll).choose(snapshot(60, 4, 4000));
  CHECK(choice.mode == StepMode::kNear);
  CHECK(far_of(choice).empty());
  // With nothing near the far rows are all there is.
  CHECK(chooser(fast, kAll).choose(snapshot(0, 4, 4000)).mode != StepMode::kNear);
  CHECK(chooser(fast, modes({StepMode::kNear})).choose(snapshot(0, 4, 4000)).table_s == 0);
}

TEST_CASE("the engine executes all modes, and none is chosen that is not allowed") {
  CHECK(helm::executed_modes() == kAll);
  const ModeSet without = modes({StepMode::kNear, StepMode::kJoint});
  CHECK(chooser(machine(250, 50), without).choose(snapshot(4, 60, 400)).mode == StepMode::kJoint);
}

// Joins in order, of any number of rows; a second has the most tokens.
TEST_CASE("as many far rows join as bring most tokens a second, of all numbers") {
  std::mt19937 random(5);
  int64_t some = 0;
  for (int trial = 0; trial < 300; ++trial) {
    CAPTURE(trial);
    const VirtualMachine own = machine(100 + static_cast<double>(random() % 2000),
                                       10 + static_cast<double>(random() % 100));
    ModeSnapshot now =
        snapshot(static_cast<int64_t>(random() % 4), 1 + static_cast<int64_t>(random() % 8), 0);
    for (helm::ModeRow& row : now.rows) {
      row.length = 1 + static_cast<int64_t>(random() % 3000);
      row.skips = static_cast<int64_t>(random() % 4);
    }
    if (random() % 2 == 0) now.prompts.push_back({0, 100, 200, false, false});
    const Predictor predictor(own.tables(), helm::test::kVirtualPage);
    // By hand: near alone, then one row more each time.
    StepLoad load = predictor.load();
    double tokens = 0;
    std::vector<size_t> far;
    for (size_t i = 0; i < now.rows.size(); ++i) {
      if (now.rows[i].far) far.push_back(i);
      if (!now.rows[i].far) {
        predictor.add(load.near, static_cast<double>(now.rows[i].length));
        ++load.outputs, ++tokens;
      }
    }
    if (!now.prompts.empty()) predictor.add_prompt(load, 0, 100, false), tokens += 0.5;
    std::stable_sort(far.begin(), far.end(),
                     [&](size_t a, size_t b) { return now.rows[a].skips > now.rows[b].skips; });
    double most = tokens > 0 ? tokens / predictor.seconds(StepMode::kNear, load) : 0;
    size_t best = 0;
    for (size_t count = 1; count <= far.size(); ++count) {
      predictor.add(load.far[0], static_cast<double>(now.rows[far[count - 1]].length));
      ++load.outputs, ++tokens;
      const double rate = tokens / predictor.seconds(StepMode::kJoint, load);
      // A step that was near stays so for a gain of three percent.
      if (rate > most / (best == 0 ? ModeChooser::kStay : 1)) most = rate, best = count;
    }
    const ModeChoice choice = chooser(own, modes({StepMode::kNear, StepMode::kJoint})).choose(now);
    CHECK((choice.mode == StepMode::kJoint) == (best > 0));
    CHECK(choice.far == std::vector<size_t>(far.begin(), far.begin() + static_cast<long>(best)));
    some += best > 0 && best < far.size();
  }
  CHECK(some > 10);
}

TEST_CASE("in a split step the CPU is hidden, and each row is in one sub-batch") {
  std::mt19937 random(7);
  int64_t split = 0;
  for (int trial = 0; trial < 200; ++trial) {
    const VirtualMachine own = machine(250, 40 + static_cast<double>(random() % 60));
    ModeSnapshot now = snapshot(2, 40, 0);
    for (helm::ModeRow& row : now.rows) row.length = 100 + static_cast<int64_t>(random() % 700);
    const ModeChoice choice = chooser(own, modes({StepMode::kNear, StepMode::kSplit})).choose(now);
    if (choice.mode != StepMode::kSplit) continue;
    ++split;
    const Predictor predictor(own.tables(), helm::test::kVirtualPage);
    StepLoad load = predictor.load();
    std::set<size_t> seen;
    for (size_t i = 0; i < 2; ++i)
      predictor.add(load.near, static_cast<double>(now.rows[i].length));
    for (const size_t batch : {0, 1}) {
      for (const size_t row : batch == 0 ? choice.far : choice.second) {
        CHECK(now.rows[row].far);
        CHECK(seen.insert(row).second);
        predictor.add(load.far[batch], static_cast<double>(now.rows[row].length));
      }
    }
    const auto hidden = predictor.hidden_s(load);
    CHECK(hidden[0] >= 0);
    CHECK(hidden[1] >= 0);
  }
  CHECK(split > 50);
}

TEST_CASE("a far row is passed over a few times, then one by one as many as are due") {
  for (const ModeSet allowed : {kAll, modes({StepMode::kNear, StepMode::kJoint}),
                                modes({StepMode::kNear, StepMode::kSplit})}) {
    const int64_t far = 6;
    ModeChooser own = chooser(machine(3000, 20), allowed);
    ModeSnapshot now = snapshot(40, far, 4000);
    int64_t most = 0, near = 0;
    for (int step = 0; step < 300; ++step) {
      const ModeChoice choice = own.choose(now);
      near += choice.mode == StepMode::kNear;
      for (helm::ModeRow& row : now.rows) row.skips += row.far;
      for (const size_t row : far_of(choice)) now.rows[row].skips = 0;
      for (const helm::ModeRow& row : now.rows) most = std::max(most, row.skips);
    }
    CHECK(near > 0);
    CHECK(most <= ModeChooser::kMostSkips + far);
  }
  // By time, too, and then all of them: what they will have waited when the step ends.
  for (const size_t late : {size_t{1}, size_t{2}}) {
    ModeChooser own = chooser(machine(3000, 20), kAll);
    ModeSnapshot now = snapshot(40, 3, 4000);
    now.usual_s = 1;
    const double most_s = ModeChooser::kMostWait - own.choose(now).table_s;
    REQUIRE(most_s > 0);
    std::vector<size_t> rows;
    for (size_t row = 43 - late; row < 43; ++row) {
      rows.push_back(row);
      now.rows[row].waited_s = 0.99 * most_s;
    }
    CHECK(own.choose(now).mode == StepMode::kNear);
    for (const size_t row : rows) now.rows[row].waited_s = 1.01 * most_s;
    std::vector<size_t> found = far_of(own.choose(now));
    std::sort(found.begin(), found.end());
    CHECK(found == rows);
  }
}

TEST_CASE("far rows join no step that has no room for them") {
  ModeSnapshot now = snapshot(2, 6, 400);
  for (const auto& [rows, outputs] : std::vector<std::pair<int64_t, int64_t>>{{5, 64}, {512, 5}}) {
    now.most_rows = rows;
    now.most_outputs = outputs;
    for (const StepMode mode : {StepMode::kJoint, StepMode::kSplit}) {
      ModeChooser own = chooser(machine(250, 50), kAll);
      own.force(mode);
      CHECK(far_of(own.choose(now)).size() <= 3);
    }
  }
  now.most_outputs = 2;
  CHECK(chooser(machine(250, 50), kAll).choose(now).mode == StepMode::kNear);
}

TEST_CASE("a mode stays while another brings little more, and is the one that tests force") {
  ModeChooser own = chooser(machine(250, 50), kAll);
  ModeSnapshot now = snapshot(2, 4, 400);
  for (const StepMode mode : {StepMode::kSplit, StepMode::kNear, StepMode::kJoint}) {
    own.force(mode);
    CHECK(own.choose(now).mode == mode);
  }
  own.force({});
  // Joint steps turn out dearer until near is better by more than three percent.
  const ModeChoice joint = own.choose(now);
  REQUIRE(joint.mode == StepMode::kJoint);
  ModeChooser fresh = chooser(machine(250, 50), modes({StepMode::kNear, StepMode::kJoint}));
  StepMode last = StepMode::kJoint;
  double turned = 0;
  fresh.force(StepMode::kJoint);
  fresh.choose(now);
  fresh.force({});
  const Predictor& predictor = fresh.predictor();
  StepLoad load = predictor.load();
  for (int i = 0; i < 2; ++i) predictor.add(load.near, 400);
  load.outputs = 2;
  const double near = 2 / predictor.seconds(StepMode::kNear, load);
  for (int i = 0; i < 200 && last == StepMode::kJoint; ++i) {
    fresh.note(joint, 2 * joint.table_s);
    turned = joint.progress / predictor.corrected_s(StepMode::kJoint, joint.table_s);
    last = fresh.choose(now).mode;
  }
  CHECK((last == StepMode::kNear) == (turned < ModeChooser::kStay * near));
}

TEST_CASE("far requests begin only where they pay") {
  const helm::RequestShape shape{372, 45, 372};
  const ModeChooser own = chooser(machine(250, 50), modes({StepMode::kNear, StepMode::kJoint}));
  const int64_t best = own.far_requests(2, 60, shape);
  CHECK(best > 2);
  CHECK(own.rate(2, best, shape) > 1.5 * own.rate(2, 0, shape));
  CHECK(chooser(machine(250, 50), modes({StepMode::kNear})).far_requests(2, 60, shape) == 0);
  CHECK(chooser(machine(3000, 5), kAll).far_requests(60, 60, {4000, 400, 512}) == 0);
}
