// Partial attention: values, masks, windows, merging of spans, bits independent of the query count.
#include <doctest/doctest.h>

#include <cmath>
#include <map>
#include <sstream>

#include "cpu/workspace.h"
#include "oracle.h"
#include "tiers.h"

namespace helm::test {
namespace {

struct Problem {
  int64_t queries, group, head_dim, count;
  int64_t first_query, first_key = 0, window = 0;
  float scale = 0.3f;
  int64_t rotary = 0;  // of a bias that i8 keys lack
  float softcap = 0;
};

struct Result {
  std::vector<float> m, s, o;
};

struct Data {
  Data(const Problem& p, DType dtype, uint32_t seed)
      : q_stride(p.group * p.head_dim + 5),
        q(random_floats((p.queries - 1) * q_stride + p.group * p.head_dim, seed)),
        k(encode(dtype, random_floats(p.count * p.head_dim, seed + 1))),
        v(encode(dtype, random_floats(p.count * p.head_dim, seed + 2))),
        k_scale(scales(dtype, p.count, seed + 3)),
        v_scale(scales(dtype, p.count, seed + 4)),
        bias(dtype == DType::kI8 && p.rotary > 0 ? biases(p.head_dim, seed + 5)
                                                 : std::vector<float>()),
        block_turns(turns((p.count + cpu::kKeyBlock - 1) / cpu::kKeyBlock, p.rotary, seed + 6)),
        place_turns(turns(cpu::kKeyBlock, p.rotary, seed + 7)),
        m(p.queries * p.group),
        s(p.queries * p.group),
        o(p.queries * p.group * p.head_dim) {}
  int64_t q_stride;
  Guarded<float> q;
  Guarded<unsigned char> k, v;
  Guarded<float> k_scale, v_scale;
  Guarded<float> bias, block_turns, place_turns;
  Guarded<float> m, s, o;

  cpu::KvSpan span(const Problem& p) const {
    const bool scaled = k_scale.size() > 0;
    return {k.data(), v.data(), scaled ? k_scale.data() : nullptr,
            scaled ? v_scale.data() : nullptr, p.count};
  }

 private:
  // Of integers of up to 127: about 1/127, over two orders of magnitude.
  static std::vector<float> scales(DType dtype, int64_t count, uint32_t seed) {
    if (kv_scale_bytes(dtype) == 0) return {};
    std::vector<float> out = random_floats(count, seed);
    for (float& v : out) v = (v * v + 0.01F) / 127;
    return out;
  }
  // Many times as large as what the keys hold.
  static std::vector<float> biases(int64_t count, uint32_t seed) {
    std::vector<float> out = random_floats(count, seed);
    for (float& v : out) v *= 40;
    return out;
  }
  // Rows of cosines, then sines, of any angles.
  static std::vector<float> turns(int64_t rows, int64_t rotary, uint32_t seed) {
    const int64_t half = rotary / 2;
    const std::vector<float> angles = random_floats(rows * half, seed);
    std::vector<float> out(static_cast<size_t>(rows * rotary));
    for (int64_t i = 0; i < rows * half; ++i) {
      const auto at = static_cast<size_t>(i / half * rotary + i % half);
      out[at] = std::cos(10 * angles[static_cast<size_t>(i)]);
      out[at + static_cast<size_t>(half)] = std::sin(10 * angles[static_cast<size_t>(i)]);
    }
    return out;
  }
};

cpu::AttentionArgs args_of(const Problem& p, const Data& d, const Scratch& scratch) {
  cpu::AttentionArgs args = {
      d.q.data(),  d.q_stride, p.queries,     p.group,   p.head_dim, p.first_query,
      p.first_key, p.window,   p.scale,       d.span(p), {},         d.m.data(),
      d.s.data(),  d.o.data(), scratch.data()};
  args.softcap = p.softcap;
  if (d.bias.size() > 0) {
    args.bias = d.bias.data();
    args.rotary = p.rotary;
    args.block_turns = d.block_turns.data();
    args.place_turns = d.place_turns.data();
  }
  return args;
}

std::string label_of(const cpu::KernelTable& table, DType dtype, const Problem& p, uint32_t seed) {
  std::ostringstream s;
  s << table.name << " attention dtype " << index_of(dtype) << " queries " << p.queries << " group "
    << p.group << " head_dim " << p.head_dim << " keys " << p.count << " first_query "
    << p.first_query << " first_key " << p.first_key << " window " << p.window << " seed " << seed;
  return s.str();
}

// Replaces -inf, which has no distance, by a number, and requires it exactly where it is expected.
std::vector<float> finite_where(const std::vector<float>& got, std::vector<double>* want) {
  std::vector<float> out = got;
  for (size_t i = 0; i < out.size(); ++i) {
    if ((*want)[i] == -INFINITY) {
      CHECK(out[i] == -INFINITY);
      out[i] = 0, (*want)[i] = 0;
    }
  }
  return out;
}

void check_result(const Result& r, ExpectedAttention want, int64_t head_dim,
                  const std::string& label) {
  std::vector<float> log_sum, out;
  for (size_t i = 0; i < r.s.size(); ++i) log_sum.push_back(r.m[i] + std::log(r.s[i]));
  for (size_t i = 0; i < r.o.size(); ++i) {
    const float s = r.s[i / static_cast<size_t>(head_dim)];
    if (s == 0) CHECK(r.o[i] == 0);
    out.push_back(s == 0 ? 0 : r.o[i] / s);
  }
  CHECK(compare(finite_where(r.m, &want.m.value), want.m.value, want.m.bound, label + " m") == "");
  CHECK(compare(finite_where(log_sum, &want.log_sum.value), want.log_sum.value, want.log_sum.bound,
                label + " log_sum") == "");
  CHECK(compare(out, want.out.value, want.out.bound, label + " out") == "");
}

// What a tier's attention over keys and values of `dtype` rounds its inputs to.
DType inputs_of(const cpu::KernelTable& table, DType dtype) {
  return dtype == DType::kI8 ? DType::kF32 : table.activations[index_of(dtype)];
}

void check_problem(const Problem& p, uint32_t seed) {
  for (DType dtype : kKvTypes) {
    const Data d(p, dtype, seed);
    std::map<DType, ExpectedAttention> wants;
    for (const cpu::KernelTable* table : tiers()) {
      const Scratch scratch(*table, p.head_dim);
      const cpu::AttentionArgs args = args_of(p, d, scratch);
      const DType inputs = inputs_of(*table, dtype);
      ExpectedAttention& want = wants[inputs];
      if (want.m.value.empty()) want = oracle_attention(args, dtype, inputs);
      table->attention[index_of(dtype)](args);
      const std::string label = label_of(*table, dtype, p, seed);
      check_result({d.m.copy(), d.s.copy(), d.o.copy()}, want, p.head_dim, label);
      CHECK_MESSAGE((d.m.intact() && d.s.intact() && d.o.intact() && scratch.intact()), label);
    }
  }
}

}  // namespace

TEST_CASE("attention: head sizes and group sizes, one query and many") {
  uint32_t seed = 1000;
  for (int64_t head_dim : {1, 7, 8, 16, 17, 20, 64, 80, 96, 128, 256}) {
    check_problem({1, 2, head_dim, 70, 69}, seed++);
    check_problem({19, 2, head_dim, 70, 51}, seed++);
  }
  for (int64_t group : {1, 2, 3, 4, 5, 7, 8, 12, 16, 17}) {
    check_problem({1, group, 32, 129, 128}, seed++);
    check_problem({9, group, 32, 65, 56}, seed++);
  }
}

TEST_CASE("attention: span sizes, masks and windows") {
  uint32_t seed = 2000;
  for (int64_t count : {1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 300}) {
    check_problem({1, 2, 24, count, count - 1}, seed++);
    check_problem({count, 1, 24, count, 0}, seed++);
  }
  for (int64_t window : {1, 5, 64, 100}) {
    check_problem({1, 3, 16, 200, 199, 0, window}, seed++);
    check_problem({130, 1, 16, 200, 70, 0, window}, seed++);
    check_problem({40, 1, 16, 200, 500, 300, window}, seed++);
  }
  check_problem({10, 2, 16, 30, 100, 105}, seed++);    // some queries before the span
  check_problem({3, 2, 16, 30, 10, 100}, seed++);      // all queries before the span
  check_problem({3, 2, 16, 30, 1000, 0, 50}, seed++);  // span out of the window
  check_problem({20, 2, 16, 130, 129, 0, 0, 0.0f}, seed++);
  check_problem({20, 2, 16, 130, 129, 0, 0, -1.0f}, seed++);
  check_problem({20, 2, 16, 130, 129, 0, 0, 40.0f}, seed++);  // one key takes all the weight
}

TEST_CASE("attention: soft caps of scores") {
  uint32_t seed = 2400;
  for (const float softcap : {0.05f, 2.0f, 50.0f}) {
    check_problem({1, 3, 24, 200, 199, 0, 0, 0.3f, 0, softcap}, seed++);
    check_problem({40, 2, 24, 200, 160, 0, 60, 0.3f, 0, softcap}, seed++);
    check_problem({40, 2, 64, 130, 90, 0, 0, 0.02f, 64, softcap}, seed++);
  }
}

TEST_CASE("attention: i8 keys that lack a bias") {
  uint32_t seed = 2500;
  for (const auto& [head_dim, rotary] : std::vector<std::pair<int64_t, int64_t>>{
           {2, 2}, {12, 12}, {20, 8}, {64, 64}, {80, 80}, {128, 96}}) {
    check_problem({1, 3, head_dim, 300, 299, 0, 0, 0.02f, rotary}, seed++);
    check_problem({45, 2, head_dim, 300, 1255, 1000, 0, 0.02f, rotary}, seed++);
    check_problem({45, 2, head_dim, 129, 84, 0, 60, 0.02f, rotary}, seed++);
    check_problem({45, 2, head_dim, 17, 0, 0, 0, 0.02f, rotary}, seed++);
  }
}

TEST_CASE("attention: the bits of a row do not depend on the number of queries") {
  for (DType dtype : kKvTypes) {
    for (const cpu::KernelTable* table : tiers()) {
      for (const auto& [window, rotary] : {std::pair(0, 0), std::pair(90, 0), std::pair(0, 48)}) {
        const Problem p{150, 2, 48, 300, 150, 0, window, 0.3f, rotary};
        const Data d(p, dtype, 3000);
        const Scratch scratch(*table, p.head_dim);
        const cpu::AttentionArgs whole = args_of(p, d, scratch);
        table->attention[index_of(dtype)](whole);
        const Result want{d.m.copy(), d.s.copy(), d.o.copy()};
        for (int64_t step : {1, 2, 7, 31, 64}) {
          for (int64_t i = 0; i < p.queries; i += step) {
            cpu::AttentionArgs part = whole;
            part.q += i * d.q_stride;
            part.queries = std::min(step, p.queries - i);
            part.first_query += i;
            part.m += i * p.group;
            part.s += i * p.group;
            part.o += i * p.group * p.head_dim;
            part.next = i % 2 == 0 ? whole.span : cpu::KvSpan{};  // changes nothing
            table->attention[index_of(dtype)](part);
          }
          const std::string label = label_of(*table, dtype, p, 3000);
          CHECK(compare_bits(d.m.copy(), want.m, label + " m") == "");
          CHECK(compare_bits(d.s.copy(), want.s, label + " s") == "");
          CHECK(compare_bits(d.o.copy(), want.o, label + " o") == "");
        }
      }
    }
  }
}

TEST_CASE("attention: partials of two spans merge to the partial of one") {
  const Problem p{5, 2, 40, 180, 120};
  for (DType dtype : kKvTypes) {
    const Data d(p, dtype, 4000);
    for (const cpu::KernelTable* table : tiers()) {
      const Scratch scratch(*table, p.head_dim);
      const cpu::AttentionArgs whole = args_of(p, d, scratch);
      const ExpectedAttention want = oracle_attention(whole, dtype, inputs_of(*table, dtype));
      const int64_t rows = p.queries * p.group, cut = 123, bytes = dtype_bytes(dtype) * p.head_dim;
      cpu::AttentionArgs first = whole, second = whole;
      first.span.count = cut;
      second.first_key = cut;
      second.span.k = static_cast<const char*>(whole.span.k) + cut * bytes;
      second.span.v = static_cast<const char*>(whole.span.v) + cut * bytes;
      second.span.count = p.count - cut;
      if (whole.span.k_scale) second.span.k_scale += cut, second.span.v_scale += cut;
      const Data other(p, dtype, 4000);
      second.m = other.m.data(), second.s = other.s.data(), second.o = other.o.data();
      table->attention[index_of(dtype)](first);
      table->attention[index_of(dtype)](second);
      table->attention_merge(rows, p.head_dim, first.m, first.s, first.o, second.m, second.s,
                             second.o);
      const std::string label = label_of(*table, dtype, p, 4000) + " merged";
      check_result({d.m.copy(), d.s.copy(), d.o.copy()}, want, p.head_dim, label);
      table->attention_finish(rows, p.head_dim, first.s, first.o);
      CHECK(compare(d.o.copy(), want.out.value, want.out.bound, label + " finished") == "");
    }
  }
}

TEST_CASE("attention: empty partials merge and finish to nothing") {
  for (const cpu::KernelTable* table : tiers()) {
    const float none = -INFINITY;
    float m_a[2] = {none, none}, s_a[2] = {0, 0}, o_a[6] = {};
    const float m_b[2] = {none, 1.5f}, s_b[2] = {0, 2}, o_b[6] = {0, 0, 0, 1, 2, 3};
    table->attention_merge(2, 3, m_a, s_a, o_a, m_b, s_b, o_b);
    CHECK(m_a[0] == none);
    CHECK(s_a[0] == 0);
    CHECK(m_a[1] == 1.5f);
    CHECK(s_a[1] == 2);
    const float empty_m[2] = {none, none}, empty[6] = {};
    table->attention_merge(2, 3, m_a, s_a, o_a, empty_m, empty, empty);
    CHECK(m_a[1] == 1.5f);
    table->attention_finish(2, 3, s_a, o_a);
    for (int i = 0; i < 6; ++i) CHECK(o_a[i] == static_cast<float>(i < 3 ? 0 : i - 2) / 2);
  }
}

TEST_CASE("attention: no isa takes more scratch than a plan counts") {
  for (const cpu::KernelTable* table : tiers()) {
    for (const int64_t head_dim : {0, 1, 63, 64, 128, 256, 4096}) {
      CHECK(table->scratch_bytes(head_dim) <= cpu::most_scratch_bytes(head_dim));
    }
  }
}

}  // namespace helm::test
