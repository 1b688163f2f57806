#include "serve/virtual_server.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <memory>

#include "serve/growth.h"

namespace helm::test {

PredictorTables VirtualMachine::tables() const {
  PredictorTables t;
  const auto count = static_cast<double>(layers);
  const double knee = layer_bytes / gpu_bytes_per_s * gpu_flops / (2 * layer_weights);
  for (const int64_t rows : {int64_t{1}, static_cast<int64_t>(knee), int64_t{1} << 20}) {
    t.rows.push_back(rows);
    const double flops = 2 * static_cast<double>(rows) * layer_weights;
    t.accelerator_s.push_back(count * std::max(layer_bytes / gpu_bytes_per_s, flops / gpu_flops));
    t.accelerator_beside_s.push_back(t.accelerator_s.back());
    t.cpu_s.push_back(0);
    t.head_s.push_back(head_bytes / gpu_bytes_per_s);
  }
  AttentionTimes& a = t.attention.emplace_back();
  a.layers = layers;
  a.near_s = a.near_beside_s = count * position_bytes / gpu_bytes_per_s;
  a.far_s = a.far_beside_s = count * position_bytes / cpu_bytes_per_s;
  a.pair_s.assign(t.rows.size(), count * 4 * width / gpu_attention_flops);
  a.cpu_pair_s.assign(t.rows.size(), 0);
  t.ask_s = ask_s;
  t.answer_row_s = 2e-6;
  const double block = kVirtualPage * count * position_bytes / link_bytes_per_s;
  t.block_to_host_s = t.block_to_accelerator_s = block;
  return t;
}

namespace {

constexpr int64_t kStays = 8;        // steps before a request that left comes back
constexpr double kComesBack = 0.95;  // share of near room that is filled by it at most

struct Job {
  Place place;
  int64_t prompt = 0, output = 0, most = 0;
  int64_t length = 0, capacity = 0, blocks = 0, drawn = 0, pending = 0, skips = 0, idle = 0;
  bool far = false, again = false;
  int64_t moved_at = 0;

  bool decoding() const { return drawn > 0 && !again; }
};

class Server {
 public:
  Server(const VirtualMachine& machine, const std::vector<VirtualRequest>& requests, ModeSet modes,
         bool all_far)
      : machine_(machine),
        chooser_(Predictor(machine.tables(), kVirtualPage), modes),
        scheduler_({machine.step_tokens, machine.step_outputs, 1, false, 1}),
        block_s_(machine.tables().block_to_host_s),
        all_far_(all_far),
        near_blocks_(machine.near_tokens / kVirtualPage),
        far_blocks_(modes.count() > 1 ? machine.far_tokens / kVirtualPage : 0) {
    found_.modes.assign(modes.size(), 0);
    for (const VirtualRequest& request : requests) {
      Job& job = jobs_.emplace_back();
      job.place = {std::ssize(jobs_) - 1, Request::kNormal, 0, 0};
      job.prompt = request.prompt;
      job.output = request.output;
      job.most = request.prompt + request.output - 1;
      shape_.prompt += static_cast<double>(request.prompt);
      shape_.output += static_cast<double>(request.output);
      ranking_.come(job.place);
      waiting_.push_back(&job);
    }
    shape_.prompt /= static_cast<double>(jobs_.size());
    shape_.output /= static_cast<double>(jobs_.size());
    shape_.chunk = std::min(shape_.prompt, static_cast<double>(machine.step_tokens));
  }

  VirtualResult run() {
    while (!waiting_.empty() || !running_.empty()) {
      moved_ = 0;
      come_back();
      admit();
      REQUIRE(!running_.empty());
      step();
    }
    CHECK(used_[0] == 0);
    CHECK(used_[1] == 0);
    return found_;
  }

 private:
  int64_t room(bool far) const { return (far ? far_blocks_ : near_blocks_) - used_[far]; }

  bool reserve(Job& job, int64_t capacity, int64_t spare) {
    const int64_t blocks = (capacity + kVirtualPage - 1) / kVirtualPage;
    if (blocks - job.blocks + spare > room(job.far)) return false;
    used_[job.far] += blocks - job.blocks;
    job.blocks = blocks;
    job.capacity = capacity;
    return true;
  }

  void move(Job& job, bool far) {
    used_[job.far] -= job.blocks;
    used_[far] += job.blocks;
    moved_ += job.blocks;
    job.far = far;
    job.moved_at = found_.steps;
    ++(far ? found_.to_host : found_.back);
  }

  // Oldest first.
  void come_back() {
    if (all_far_) return;
    for (Job* job : running_) {
      if (!job->far || job->pending > 1 || found_.steps - job->moved_at < kStays) continue;
      const auto filled = static_cast<double>(used_[0] + job->blocks);
      if (filled > kComesBack * static_cast<double>(near_blocks_)) return;
      move(*job, false);
    }
  }

  // First come, first served. What finds no room near is far while that pays.
  void admit() {
    while (!waiting_.empty()) {
      Job& job = *waiting_.front();
      int64_t spare = 0, near = 0, far = 0;
      for (const Job* other : running_) {
        ++(other->far ? far : near);
        if (!other->far) spare += next_blocks(other->capacity, other->most);
      }
      const int64_t capacity = promised({}, job.prompt + job.drawn, job.most, kVirtualPage);
      job.far = all_far_;
      if (all_far_ || !reserve(job, capacity, spare)) {
        if (far_blocks_ == 0) return;
        const int64_t least = all_far_ ? machine_.step_outputs : most_far(near);
        job.far = true;
        if (far >= least || near + far >= machine_.step_outputs) return;
        if (!reserve(job, capacity, far)) return;
        job.moved_at = found_.steps;
      }
      job.pending = job.prompt + job.drawn;
      job.again = job.place.rank >= 0;
      ranking_.begin(job.place, found_.seconds);
      running_.push_back(&job);
      std::sort(running_.begin(), running_.end(),
                [](const Job* a, const Job* b) { return a->place.id < b->place.id; });
      waiting_.pop_front();
    }
  }

  int64_t most_far(int64_t near) {
    if (near != near_of_target_) {
      near_of_target_ = near;
      target_ = chooser_.far_requests(near, machine_.step_outputs - near, shape_);
    }
    return target_;
  }

  // Room for what the step adds; whoever is least moves to the host or, where that is full, waits.
  bool make_room() {
    for (const BatchRow& row : batch_.rows) {
      Job& job = *running_[row.runner];
      const int64_t needed = job.length + row.tokens;
      if (needed <= job.capacity) continue;
      if (reserve(job, whole_blocks(needed, job.most, kVirtualPage), 0)) continue;
      Job* least = nullptr;
      for (Job* other : running_) {
        if (other->far != job.far) continue;
        if (least == nullptr || Ranking::yields(other->place, least->place)) least = other;
      }
      if (!least->far && least->decoding() && least->blocks <= room(true)) {
        move(*least, true);
      } else {
        used_[least->far] -= least->blocks;
        least->blocks = least->capacity = least->length = 0;
        ++found_.parked;
        std::erase(running_, least);
        waiting_.push_front(least);
      }
      return false;
    }
    return true;
  }

  void step() {
    do {
      snapshot_.runners.clear();
      for (const Job* job : running_)
        snapshot_.runners.push_back({job->pending, job->decoding(), 0});
      scheduler_.plan(snapshot_, batch_);
    } while (!make_room());
    ModeSnapshot modes;
    std::vector<Job*> decodes, ran;
    modes.most_rows = machine_.step_tokens;
    modes.most_outputs = machine_.step_outputs;
    std::vector<std::pair<Job*, BatchRow>> prompts;
    for (const BatchRow& row : batch_.rows) {
      Job& job = *running_[row.runner];
      if (job.decoding()) {
        decodes.push_back(&job);
        modes.rows.push_back({job.length + 1, job.far, job.skips, 0});
      } else {
        prompts.emplace_back(&job, row);
        modes.prompts.push_back(
            {job.length, row.tokens, job.prompt + job.drawn, row.output, job.far});
        if (job.far && row.output) moved_ += job.blocks;
      }
    }
    const ModeChoice choice = chooser_.choose(modes);
    std::vector<bool> taken(decodes.size());
    for (size_t i = 0; i < decodes.size(); ++i) taken[i] = !modes.rows[i].far;
    for (const auto* joined : {&choice.far, &choice.second}) {
      for (const size_t i : *joined) taken[i] = true;
    }
    int64_t far = 0;
    for (size_t i = 0; i < decodes.size(); ++i) {
      Job& job = *decodes[i];
      far += job.far;
      job.skips = taken[i] ? 0 : job.skips + 1;
      found_.most_idle = std::max(found_.most_idle, job.skips);
      if (!taken[i]) continue;
      ++job.length;
      ran.push_back(&job);
    }
    for (const auto& [job, row] : prompts) {
      job->length += row.tokens;
      job->pending -= row.tokens;
      if (row.output) ran.push_back(job);
    }
    REQUIRE(choice.table_s > 0);
    found_.seconds += std::max(choice.table_s, static_cast<double>(moved_) * block_s_);
    chooser_.note(choice, choice.table_s);
    ++found_.steps;
    ++found_.modes[static_cast<size_t>(choice.mode)];
    found_.most_far = std::max(found_.most_far, far);
    for (Job* job : ran) {
      job->again = false;
      ++job->drawn;
      job->pending = 1;
    }
    std::erase_if(running_, [&](Job* job) {
      if (job->drawn < job->output) return false;
      used_[job->far] -= job->blocks;
      ranking_.leave(job->place);
      return true;
    });
  }

  const VirtualMachine& machine_;
  std::deque<Job> jobs_;
  ModeChooser chooser_;
  Scheduler scheduler_;
  Ranking ranking_;
  double block_s_;  // of a block's move
  bool all_far_;
  int64_t near_blocks_, far_blocks_, used_[2] = {0, 0}, moved_ = 0;
  int64_t near_of_target_ = -1, target_ = 0;
  RequestShape shape_;
  std::deque<Job*> waiting_;
  std::vector<Job*> running_;
  Snapshot snapshot_;
  Batch batch_;
  VirtualResult found_;
};

}  // namespace

VirtualResult serve(const VirtualMachine& machine, const std::vector<VirtualRequest>& requests,
                    ModeSet modes, bool all_far) {
  return Server(machine, requests, modes, all_far).run();
}

double unmixed_s(const VirtualMachine& machine, const std::vector<VirtualRequest>& requests) {
  struct Running {
    int64_t prompt, output, drawn;
    int64_t length() const { return prompt + drawn; }
  };
  const Predictor predictor(machine.tables(), kVirtualPage);
  std::deque<Running> waiting, swapped;
  std::vector<Running> running;
  for (const VirtualRequest& r : requests) waiting.push_back({r.prompt, r.output, 0});
  double seconds = 0;
  while (!waiting.empty() || !running.empty() || !swapped.empty()) {
    int64_t used = 0, tokens = 0;
    for (const Running& r : running) used += r.length();
    for (; used > machine.near_tokens; running.pop_back()) {
      used -= running.back().length();
      swapped.push_front(running.back());
    }
    StepLoad load = predictor.load();
    const size_t decoding = running.size();
    while (!swapped.empty() && used + swapped.front().length() <= machine.near_tokens) {
      used += swapped.front().length();
      running.push_back(swapped.front());
      swapped.pop_front();
    }
    const bool prompts = swapped.empty() && decoding == running.size();
    size_t begun = running.size();
    while (prompts && !waiting.empty() && std::ssize(running) < machine.step_outputs) {
      const int64_t prompt = waiting.front().prompt;
      if (used + prompt > machine.near_tokens || tokens + prompt > machine.step_tokens) break;
      predictor.add_prompt(load, 0, static_cast<double>(prompt), false);
      used += prompt, tokens += prompt;
      running.push_back(waiting.front());
      waiting.pop_front();
    }
    if (begun == running.size()) {
      begun = 0;
      for (const Running& r : running) predictor.add(load.near, static_cast<double>(r.length()));
    }
    load.outputs = static_cast<double>(running.size() - begun);
    seconds += predictor.seconds(StepMode::kNear, load);
    for (size_t i = begun; i < running.size(); ++i) ++running[i].drawn;
    std::erase_if(running, [](const Running& r) { return r.drawn >= r.output; });
  }
  return seconds;
}

}  // namespace helm::test
