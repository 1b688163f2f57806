// How products are cut for a team: every row meets every token once.
#include "cpu/linear_rows.h"

#include <doctest/doctest.h>

#include <vector>

namespace helm::test {

TEST_CASE("pieces of a product of many tokens cover it once") {
  for (const int64_t rows : {1, 31, 32, 200, 256, 1024, 1500, 4096}) {
    for (const int64_t tokens : {9, 96, 191, 512}) {
      for (const int members : {1, 2, 3, 16}) {
        CAPTURE(rows);
        CAPTURE(tokens);
        CAPTURE(members);
        const cpu::PrefillPieces pieces(rows, tokens, members);
        std::vector<int64_t> seen(static_cast<size_t>(rows), 0);  // tokens, by row
        int64_t last_row = 0;
        for (int64_t i = 0; i < pieces.count(); ++i) {
          const auto piece = pieces.at(i);
          REQUIRE(piece.row >= last_row);
          REQUIRE(piece.row < piece.end_row);
          REQUIRE(piece.end_row <= rows);
          REQUIRE(piece.token < piece.end_token);
          REQUIRE(piece.end_token <= tokens);
          last_row = piece.row;
          for (int64_t row = piece.row; row < piece.end_row; ++row) {
            // In the order of tokens, without a gap.
            REQUIRE(seen[static_cast<size_t>(row)] == piece.token);
            seen[static_cast<size_t>(row)] = piece.end_token;
          }
        }
        for (const int64_t end : seen) REQUIRE(end == tokens);
      }
    }
  }
}

TEST_CASE("a member's last piece of a product of many tokens is a small one") {
  for (const int members : {1, 2, 3}) {
    const cpu::PrefillPieces pieces(4096, 512, members);
    for (int member = 0; member < members; ++member) {
      const auto part = Team::part_of(member, members, pieces.count());
      const auto first = pieces.at(part.begin), last = pieces.at(part.end - 1);
      CHECK(first.end_token - first.token == 512);
      CHECK(last.end_token - last.token == 128);
    }
  }
}

}  // namespace helm::test
