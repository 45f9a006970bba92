"""The step transaction of one worker: begin → compute → update → commit, or halt → recover. Pure."""
